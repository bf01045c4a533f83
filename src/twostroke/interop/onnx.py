"""Writes a decoder as an ONNX graph with its KV cache as inputs and outputs, for onnxruntime and onnxruntime-genai.

It is emitted from the spec, operation by operation as ``model.decoder`` computes them, so every family is one code. Experts
multiply the rows that chose them and no others: rows are sorted by expert, as in ``model.experts``.
Inputs: ``input_ids`` (B, T), ``attention_mask`` (B, S) of the S tokens that are cached and new, padding in front,
``past_key_values.i.key`` and ``.value`` (B, K, S − T, D). Outputs: ``logits`` (B, T, V) in fp32, ``present.i.key`` and
``.value`` (B, K, S, D). B, T and S are free. Operations are those of ONNX's opset 20, but for matrices in codes:
``MatMulNBits`` of onnxruntime's contrib operations (github.com/microsoft/onnxruntime, docs/ContribOperators.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.families import config_from_spec
from twostroke.core.matrices import Matrix, attention_matrices, has_norm_bias, head_norms, mlp_matrices, qkv_rows
from twostroke.core.spec import MlaSpec, ModelSpec, MoeSpec
from twostroke.core.version import __version__
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.moved import Held, Made, new_memory, words_of
from twostroke.interop.onnx_file import CONTRIB, ELEMENT_TYPES, CountedFile, OnnxFile
from twostroke.model.latent_attention import LATENT_NORM_EPS
from twostroke.model.mlp import SWISH_LIMIT, SWISH_SLOPE
from twostroke.model.norm import norm_offset
from twostroke.model.rope import angles, by_halves
from twostroke.model.save import bytes_of_files, generation_config, write_json, write_tokenizer

GRAPH, DATA, GENAI = "model.onnx", "model.onnx.data", "genai_config.json"
BLOCK = 32
"""Numbers that share a scale in ``MatMulNBits``."""
_BITS = {"int8": (8, 8), "int4": (4, 8)}
"""Of the blocks' matrices and of the head's."""
_ACCURACY = 4
"""Of ``MatMulNBits`` in onnxruntime: inputs are rounded to int8. With 1, fp32, a row times 2048 × 2048 codes takes 0.30 ms
instead of 0.09 in int4 and 5.7 instead of 0.07 in int8, for which it has no kernel (onnxruntime 1.32, two cores of a Zen 4)."""


def write_onnx(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` as ``write_graph`` does, and with the configuration of onnxruntime-genai."""
    notes = write_graph(source, out, precision)
    if source.spec.mla is not None:
        return (*notes, "onnxruntime-genai reads keys and values of one width, which latent attention does not have.")
    write_json(out / GENAI, _genai_config(source.spec))
    return notes


def write_graph(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with the graph, its weights, the tokenizer and the model's configuration. In fp32 and fp16 everything is of
    that type; in int8 and int4 matrices are codes, the head always of 8 bits, and the rest is fp32. Memory: one matrix, or
    those of a layer's experts of one kind."""
    spec = source.spec
    with (out / DATA).open("wb") as stream:
        graph = _Graph(source, OnnxFile(stream, DATA), precision)
        graph.decoder()
    (out / GRAPH).write_bytes(graph.content())
    write_json(out / "config.json", _config(spec, precision))
    write_json(out / "generation_config.json", generation_config(spec))
    if source.tokenizer is not None:
        write_tokenizer(source.tokenizer, spec, out)
    if any(rope.scaling in ("longrope", "dynamic") for rope in spec.ropes):
        return (f"the angles of {spec.rope.scaling} positions are those of the longest context, {spec.max_positions} tokens.",)
    return ()


def expect_onnx(source: ExportSource, held: Held, precision: str) -> Made:
    """What ``write_onnx`` will write."""
    documents = [] if source.spec.mla is not None else [_genai_config(source.spec)]
    return expect_graph(source, precision, documents)


def expect_graph(source: ExportSource, precision: str, documents: Sequence[dict[str, Any]] = ()) -> Made:
    """What ``write_graph`` will write, and ``documents`` beside it: the graph is emitted of tensors without content."""
    file = CountedFile(DATA)
    graph = _Graph(source, file, precision)
    graph.decoder()
    documents = (_config(source.spec, precision), generation_config(source.spec), *documents)
    n_bytes = file.data_bytes + len(graph.content()) + bytes_of_files(documents, source.tokenizer)
    words = words_of(source.tokenizer, source.spec)
    if graph.bits is None:  # changed in type, laid out, and turned to bytes
        return Made(n_bytes, words, 0, new_memory(file.plain_sizes, 3), 3 * max(file.plain_sizes))
    encoded: Counter[str] = Counter(words)
    for bits, n in graph.coded:
        encoded[f"onnx int{bits}"] += n
    sizes = [n for _, n in graph.coded]
    new_bytes = new_memory(file.plain_sizes, 2) + new_memory((4 * n for n in sizes), _ROUNDED_BYTES / 4)
    return Made(n_bytes, encoded, len(sizes), new_bytes, _ROUNDED_BYTES * max(sizes, default=0))


_ROUNDED_BYTES = 14
"""Of memory a number, while ``in_blocks`` has it in fp32 as itself, as its size and divided by its scale, and as codes."""


def _config(spec: ModelSpec, precision: str) -> dict[str, Any]:
    return config_from_spec(spec, TORCH_NAMES[precision if precision == "fp16" else "fp32"])


class _Graph:
    def __init__(self, source: ExportSource, file: OnnxFile, precision: str) -> None:
        self.spec, self.state, self.file = source.spec, source.state, file
        self.coded: list[tuple[int, int]] = []  # of each matrix in codes their bits, and how many
        self.bits = _BITS.get(precision)
        self.dtype = torch.float16 if precision == "fp16" else torch.float32
        order = torch.arange(self.spec.head_dim)
        self.order = by_halves(order, self.spec) if self.spec.ropes else order

    def content(self) -> bytes:
        """The file of the graph."""
        return self.file.content(self.spec.family, f"twostroke {__version__}")

    def cast(self, x: str, dtype: torch.dtype) -> str:
        return self.file.node("Cast", x, to=ELEMENT_TYPES[dtype])

    def number(self, value: float, dtype: torch.dtype | None = None) -> str:
        return self.file.constant(torch.tensor(value, dtype=dtype or self.dtype))

    def whole(self, *values: int) -> str:
        return self.file.constant(torch.tensor(values, dtype=torch.int64))

    def times(self, x: str, factor: float) -> str:
        return x if factor == 1.0 else self.file.node("Mul", x, self.number(factor))

    def reshaped(self, x: str, *shape: int) -> str:
        return self.file.node("Reshape", x, self.whole(*shape))

    def capped(self, x: str, cap: float | None) -> str:
        if cap is None:
            return x
        return self.times(self.file.node("Tanh", self.times(x, 1.0 / cap)), cap)

    def product(self, x: str, name: str, bias: bool, rows: Tensor | None = None, head: bool = False) -> str:
        """x·Wᵀ + b, with W's ``rows`` in another order."""
        weight = self.state[f"{name}.weight"]
        vector = self.state[f"{name}.bias"] if bias else None
        if rows is not None:
            weight, vector = weight[rows], None if vector is None else vector[rows]
        return self.product_of(x, "head" if head else name, weight, vector, head)

    def product_of(self, x: str, label: str, weight: Tensor, bias: Tensor | None, head: bool = False) -> str:
        """x·``weight``ᵀ + ``bias``, stored under ``label``."""
        if self.bits is None:
            y = self.file.node("MatMul", x, self.file.weight(f"{label}.weight", weight.t().to(self.dtype)))
        else:
            y = self.coded_product(x, weight.float(), f"{label}.weight", self.bits[head])
        return y if bias is None else self.file.node("Add", y, self.vector(f"{label}.bias", bias))

    def coded_product(self, x: str, weight: Tensor, label: str, bits: int) -> str:
        codes, scales = in_blocks(weight, bits)
        n, k = weight.shape
        self.coded.append((bits, n * k))
        inputs = (self.file.weight(label, codes), self.file.weight(f"{label}.scales", scales.flatten()))
        return self.file.node(
            "MatMulNBits", x, *inputs, domain=CONTRIB, K=k, N=n, bits=bits, block_size=BLOCK, accuracy_level=_ACCURACY
        )

    def vector(self, name: str, value: Tensor) -> str:
        return self.file.weight(name, value.to(self.dtype))

    def norm(self, x: str, name: str, weight: Tensor | None = None, eps: float | None = None) -> str:
        """The norm ``name`` over the last dimension, computed in fp32; with ``weight``, an RMSNorm of it."""
        spec, file, full = self.spec, self.file, torch.float32
        wide = x if self.dtype == full else self.cast(x, full)
        if spec.norm == "layernorm" and weight is None:
            held = self.state[f"{name}.weight"].float() + norm_offset(spec)
            inputs = [file.weight(f"{name}.weight", held)]
            inputs += [file.weight(f"{name}.bias", self.state[f"{name}.bias"].float())] if has_norm_bias(spec) else []
            y = file.node("LayerNormalization", wide, *inputs, axis=-1, epsilon=spec.norm_eps)
        else:
            held = (self.state[f"{name}.weight"] if weight is None else weight).float() + norm_offset(spec)
            mean = file.node("ReduceMean", file.node("Mul", wide, wide), self.whole(-1), keepdims=1)
            root = file.node("Sqrt", file.node("Add", mean, self.number(spec.norm_eps if eps is None else eps, full)))
            y = file.node("Mul", file.node("Div", wide, root), file.weight(f"{name}.weight", held))
        return y if self.dtype == full else self.cast(y, self.dtype)

    def decoder(self) -> None:
        spec, file, away = self.spec, self.file, self.spec.departures
        ids = file.input("input_ids", torch.int64, ("batch", "tokens"))
        self.attention_mask = file.input("attention_mask", torch.int64, ("batch", "all_tokens"))
        file.output("logits", torch.float32, ("batch", "tokens", spec.vocab_size))
        self.positions_and_masks(ids)
        table = self.dtype if self.bits is None else torch.float16
        held = file.weight("embed.weight", self.state["embed.weight"].to(table))
        x = file.node("Gather", held, ids)
        x = self.times(x if self.bits is None else self.cast(x, self.dtype), away.embedding_scale)
        if spec.positions == "learned":
            learned = self.vector("position_embed.weight", self.state["position_embed.weight"])
            x = file.node("Add", x, file.node("Gather", learned, self.positions))
        for layer in range(spec.n_layers):
            x = self.block(x, layer)
        x = self.times(self.norm(x, "final_norm"), away.logit_scale)
        logits = self.product(x, "embed" if spec.tied_embeddings else "head", bias=False, head=True)
        logits = self.capped(logits, away.logit_cap)
        file.node("Cast", logits, name="logits", to=ELEMENT_TYPES[torch.float32])

    def positions_and_masks(self, ids: str) -> None:
        """``positions`` (B, T) of the new tokens, the rotary tables and, by window, what is added to scores (B, 1, 1, T, S)."""
        file, spec = self.file, self.spec
        n_new, n_all = (file.node("Shape", x, start=1, end=2) for x in (ids, self.attention_mask))
        before = file.node("Sub", n_all, n_new)
        counted = file.node("Sub", file.node("CumSum", self.attention_mask, self.whole(1)), self.whole(1))
        counted = file.node("Max", counted, self.whole(0))  # padding
        self.positions = file.node("Slice", counted, before, n_all, self.whole(1))
        scalar = file.constant(torch.tensor([], dtype=torch.int64))  # of Reshape: a shape without dimensions
        zero, one = (file.constant(torch.tensor(n)) for n in (0, 1))
        keys = file.node("Range", zero, file.node("Reshape", n_all, scalar), one)
        queries = file.node("Unsqueeze", file.node("Slice", keys, before, n_all, self.whole(0)), self.whole(1))
        distance = file.node("Sub", queries, file.node("Unsqueeze", keys, self.whole(0)))  # (T, S)
        behind = file.node("GreaterOrEqual", distance, self.whole(0))
        present = file.node("Unsqueeze", self.cast(self.attention_mask, torch.bool), self.whole(1, 2, 3))
        self.masks: dict[int | None, str] = {}
        for window in dict.fromkeys(spec.window_of_layer(i) for i in range(spec.n_layers)):
            seen = behind if window is None else file.node("And", behind, file.node("Less", distance, self.whole(window)))
            seen = file.node("And", present, seen)
            self.masks[window] = file.node("Where", seen, self.number(0.0), self.number(torch.finfo(self.dtype).min))
        self.tables = {}
        wide = self.cast(file.node("Unsqueeze", self.positions, self.whole(2, 3)), torch.float32)
        for rope in spec.ropes:
            found = angles(spec, rope, spec.max_positions)
            half = spec.head_dim // 2 if spec.mla is None else spec.mla.qk_rope_dim // 2
            turned = file.node("Mul", wide, file.constant(found.frequencies[:half]))
            magnitudes = file.constant(found.magnitudes[:half])
            tables = (file.node("Mul", file.node(kind, turned), magnitudes) for kind in ("Cos", "Sin"))  # (B, T, 1, D/2)
            self.tables[rope] = tuple(self.cast(table, self.dtype) for table in tables)

    def rotated(self, x: str, layer: int) -> str:
        rope = self.spec.rope_of_layer(layer)
        if rope is None:
            return x
        file, (cos, sin) = self.file, self.tables[rope]
        a, b = file.nodes("Split", x, n=2, axis=-1, num_outputs=2)
        first = file.node("Sub", file.node("Mul", a, cos), file.node("Mul", b, sin))
        second = file.node("Add", file.node("Mul", b, cos), file.node("Mul", a, sin))
        return file.node("Concat", first, second, axis=-1)

    def head_rows(self) -> Tensor:
        """The order of the packed projection's rows in which an angle turns one number of each half."""
        spec = self.spec
        n_turned = spec.n_heads + spec.n_kv_heads
        turned = (torch.arange(n_turned)[:, None] * spec.head_dim + self.order).flatten()
        return torch.cat((turned, torch.arange(n_turned * spec.head_dim, qkv_rows(spec))))

    def normed_heads(self, x: str, name: str, n_heads: int) -> str:
        """The norm of query or key heads (B, T, heads·D), by head or over all, with weights in the order of ``head_rows``."""
        spec, weight = self.spec, self.state[f"{name}.weight"]
        if spec.departures.qk_norm_over_heads:
            weight = weight.view(n_heads, -1)[:, self.order].flatten()
            return self.reshaped(self.norm(x, name, weight), 0, 0, n_heads, spec.head_dim)
        return self.norm(self.reshaped(x, 0, 0, n_heads, spec.head_dim), name, weight[self.order])

    def heads(self, x: str, layer: int) -> tuple[str, str, str]:
        """Queries (B, T, H, D), keys and values (B, T, K, D) of the new tokens."""
        spec, name = self.spec, f"blocks.{layer}"
        h, k, d = spec.n_heads, spec.n_kv_heads, spec.head_dim
        qkv, _ = attention_matrices(spec)
        packed = self.product(x, f"{name}.{qkv.module}", qkv.bias, self.head_rows())
        q, key, value = self.file.nodes("Split", packed, self.whole(h * d, k * d, k * d), n=3, axis=-1)
        if spec.qk_norm:
            q_norm, k_norm = head_norms(spec)
            q = self.normed_heads(q, f"{name}.{q_norm.module}", h)
            key = self.normed_heads(key, f"{name}.{k_norm.module}", k)
        q, key = (self.rotated(self.reshaped(one, 0, 0, n, d), layer) for one, n in ((q, h), (key, k)))
        return q, key, self.reshaped(value, 0, 0, k, d)

    def latent_heads(self, x: str, layer: int, mla: MlaSpec) -> tuple[str, str, str]:
        """The same of latent attention: every head has keys and values of its own, rebuilt before they are cached."""
        spec, file, name = self.spec, self.file, f"blocks.{layer}.attn"
        matrices = {matrix.name: matrix for matrix in attention_matrices(spec)}
        h, still, turned = spec.n_heads, mla.qk_nope_dim, mla.qk_rope_dim
        order = torch.arange(turned)
        order = torch.cat((order[::2], order[1::2])) if spec.departures.neighbours_turn else order
        of_head = torch.cat((torch.arange(still), still + order))
        query_rows = (torch.arange(h)[:, None] * (still + turned) + of_head).flatten()
        latent_rows = torch.cat((torch.arange(mla.kv_lora_rank), mla.kv_lora_rank + order))

        def product(y: str, matrix: str, rows: Tensor | None = None) -> str:
            return self.product(y, f"{name}.{matrix}", matrices[matrix].bias, rows)

        def normed(y: str, norm: str) -> str:
            return self.norm(y, f"{name}.{norm}", self.state[f"{name}.{norm}.weight"], LATENT_NORM_EPS)

        if mla.q_lora_rank is None:
            q = product(x, "q", query_rows)
        else:
            q = product(normed(product(x, "q_a"), "q_a_norm"), "q_b", query_rows)
        q, q_turned = file.nodes("Split", self.reshaped(q, 0, 0, h, -1), self.whole(still, turned), n=2, axis=-1)
        latent, k_turned = file.nodes(
            "Split", product(x, "kv_a", latent_rows), self.whole(mla.kv_lora_rank, turned), n=2, axis=-1
        )
        rebuilt = self.reshaped(product(normed(latent, "kv_a_norm"), "kv_b"), 0, 0, h, -1)
        key, value = file.nodes("Split", rebuilt, self.whole(still, mla.v_dim), n=2, axis=-1)
        shared = file.node("Tile", self.rotated(self.reshaped(k_turned, 0, 0, 1, turned), layer), self.whole(1, 1, h, 1))
        q = file.node("Concat", q, self.rotated(q_turned, layer), axis=-1)
        return q, file.node("Concat", key, shared, axis=-1), value

    def attention(self, x: str, layer: int) -> str:
        spec, file, mla = self.spec, self.file, self.spec.mla
        h, k, d = spec.n_heads, spec.n_kv_heads, spec.head_dim
        v_dim = d if mla is None else mla.v_dim
        q, key, value = self.heads(x, layer) if mla is None else self.latent_heads(x, layer, mla)
        cached = []
        for kind, new, width in (("key", key, d), ("value", value, v_dim)):
            past = file.input(f"past_key_values.{layer}.{kind}", self.dtype, ("batch", k, "cached_tokens", width))
            now = f"present.{layer}.{kind}"
            file.node("Concat", past, file.node("Transpose", new, perm=(0, 2, 1, 3)), name=now, axis=2)
            file.output(now, self.dtype, ("batch", k, "all_tokens", width))
            cached.append(file.node("Unsqueeze", now, self.whole(2)))  # (B, K, 1, S, D)
        q = self.times(file.node("Transpose", q, perm=(0, 2, 1, 3)), spec.attention_scale)
        q = self.reshaped(q, 0, k, h // k, -1, d)  # (B, K, G, T, D)
        scores = file.node("MatMul", q, file.node("Transpose", cached[0], perm=(0, 1, 2, 4, 3)))
        scores = self.capped(scores, spec.departures.attention_cap)
        scores = file.node("Add", scores, self.masks[spec.window_of_layer(layer)])
        if spec.departures.attention_sinks:  # one more score, without a value
            sinks = self.state[f"blocks.{layer}.attn.sinks"].view(k, h // k, 1, 1)
            one = self.times(file.node("Slice", scores, self.whole(0), self.whole(1), self.whole(-1)), 0.0)
            beside = file.node("Add", one, self.vector(f"blocks.{layer}.attn.sinks", sinks))
            scores = file.node("Concat", scores, beside, axis=-1)
        shares = file.node("Softmax", scores, axis=-1)
        if spec.departures.attention_sinks:
            shares = file.node("Slice", shares, self.whole(0), self.whole(-1), self.whole(-1))
        mixed = self.reshaped(file.node("MatMul", shares, cached[1]), 0, h, -1, v_dim)
        mixed = self.reshaped(file.node("Transpose", mixed, perm=(0, 2, 1, 3)), 0, 0, h * v_dim)
        *_, out = attention_matrices(spec)
        return self.product(mixed, f"blocks.{layer}.{out.module}", out.bias)

    def mlp(self, x: str, layer: int) -> str:
        if self.spec.has_experts(layer):
            return self.experts(x, layer)
        up, down = mlp_matrices(self.spec, layer)
        return self.two_products(x, f"blocks.{layer}", up, down)

    def two_products(self, x: str, name: str, up: Matrix, down: Matrix) -> str:
        inner = self.activated(self.product(x, f"{name}.{up.module}", up.bias))
        return self.product(inner, f"{name}.{down.module}", down.bias)

    def activated(self, wide: str) -> str:
        if self.spec.mlp != "swiglu":
            return self.activation(wide)
        file = self.file
        gate, up = file.nodes("Split", wide, n=2, axis=-1, num_outputs=2)
        if self.spec.activation != "clamped_swish":
            return file.node("Mul", self.activation(gate), up)
        low, high = self.number(-SWISH_LIMIT), self.number(SWISH_LIMIT)
        gate, up = file.node("Min", gate, high), file.node("Max", file.node("Min", up, high), low)
        gate = file.node("Mul", gate, file.node("Sigmoid", self.times(gate, SWISH_SLOPE)))
        return file.node("Mul", gate, file.node("Add", up, self.number(1.0)))

    def experts(self, x: str, layer: int) -> str:
        """As ``model.experts.ExpertsMlp``. ``chosen`` and ``shares`` are (n, k) of n = B·T rows and a row's k experts."""
        spec, file, moe, name = self.spec, self.file, self.spec.moe, f"blocks.{layer}"
        assert moe is not None
        matrices = {matrix.name: matrix for matrix in mlp_matrices(spec, layer)}
        rows = self.reshaped(x, -1, spec.d_model)
        shares, chosen = self.routed(rows, f"{name}.mlp", moe)
        numbers = file.constant(torch.arange(moe.n_experts))
        per_row = file.node("Equal", file.node("Unsqueeze", chosen, self.whole(2)), numbers)  # (n, k, X)
        per_row = file.node("ReduceSum", self.cast(per_row, torch.int64), self.whole(1), keepdims=0)
        by_expert = file.node("Transpose", per_row, perm=(1, 0))  # (X, n): 1 where an expert was chosen
        flat = file.node("CumSum", self.reshaped(by_expert, -1), self.whole(0))
        place = file.node("Sub", file.node("Transpose", self.reshaped(flat, moe.n_experts, -1), perm=(1, 0)), self.whole(1))
        place = file.node("GatherElements", place, chosen, axis=1)  # (n, k): where a row's results stand among all
        ends = file.node("CumSum", file.node("ReduceSum", by_expert, self.whole(1), keepdims=0), self.whole(0))
        order = file.node("Gather", file.node("NonZero", by_expert), file.constant(torch.tensor(1)))  # rows by expert
        sorted_rows = file.node("Gather", rows, order)
        up, down = (self.expert_parts(matrices[kind], name) for kind in ("expert_gate_up", "expert_down"))
        results, start = [], self.whole(0)
        for e in range(moe.n_experts):
            end = file.node("Gather", ends, self.whole(e))
            own = file.node("Slice", sorted_rows, start, end, self.whole(0))
            results.append(self.product_of(self.activated(self.product_of(own, *up(e))), *down(e)))
            start = end
        y = file.node("Gather", file.node("Concat", *results, axis=0), place)  # (n, k, E)
        weighed = file.node("Mul", y, file.node("Unsqueeze", shares, self.whole(2)))
        y = file.node("ReduceSum", weighed, self.whole(1), keepdims=0)
        if moe.shared_width:
            shared = self.two_products(rows, name, matrices["shared_gate_up"], matrices["shared_down"])
            if moe.shared_gate:
                gate = self.plain_product(rows, f"{name}.mlp.shared_gate", None, self.dtype)
                shared = file.node("Mul", file.node("Sigmoid", gate), shared)
            y = file.node("Add", y, shared)
        return file.node("Reshape", y, file.node("Shape", x))

    def expert_parts(self, matrix: Matrix, name: str) -> Callable[[int], tuple[str, Tensor, Tensor | None]]:
        """Of each expert what ``product_of`` takes: label, matrix, bias."""
        weights = self.state[f"{name}.{matrix.module}.weight"].unflatten(0, (matrix.copies, -1))
        biases = self.state[f"{name}.{matrix.module}.bias"].unflatten(0, (matrix.copies, -1)) if matrix.bias else None
        return lambda e: (f"{name}.{matrix.module}.{e}", weights[e], None if biases is None else biases[e])

    def plain_product(self, x: str, name: str, bias: Tensor | None, dtype: torch.dtype) -> str:
        """A product of a small matrix that no precision rounds to codes."""
        y = self.file.node("MatMul", x, self.file.weight(f"{name}.weight", self.state[f"{name}.weight"].t().to(dtype)))
        return y if bias is None else self.file.node("Add", y, self.file.weight(f"{name}.bias", bias.to(dtype)))

    def routed(self, rows: str, name: str, moe: MoeSpec) -> tuple[str, str]:
        """As ``model.experts.choose_experts``, in fp32: shares in the graph's type, and experts' numbers."""
        file, full = self.file, torch.float32
        bias = self.state[f"{name}.router.bias"] if moe.router_bias else None
        logits = self.plain_product(rows if self.dtype == full else self.cast(rows, full), f"{name}.router", bias, full)
        scores = file.node("Softmax", logits, axis=-1) if moe.scores == "softmax" else file.node("Sigmoid", logits)
        ranked = scores
        if moe.correction_bias:
            correction = self.state[f"{name}.correction_bias"].to(full)
            ranked = file.node("Add", scores, file.weight(f"{name}.correction_bias", correction))
        if moe.n_groups > 1:
            by_group = self.reshaped(ranked, -1, moe.n_groups, moe.n_experts // moe.n_groups)
            best, _ = file.nodes("TopK", by_group, self.whole(2 if moe.correction_bias else 1), n=2, axis=-1)
            best = file.node("ReduceSum", best, self.whole(2), keepdims=0)
            _, groups = file.nodes("TopK", best, self.whole(moe.top_groups), n=2, axis=-1)
            numbers = file.constant(torch.arange(moe.n_groups))
            kept = self.cast(file.node("Equal", file.node("Unsqueeze", groups, self.whole(2)), numbers), torch.int64)
            kept = self.cast(file.node("ReduceSum", kept, self.whole(1), keepdims=0), torch.bool)
            least = self.number(torch.finfo(full).min, full)
            ranked = file.node("Where", file.node("Unsqueeze", kept, self.whole(2)), by_group, least)
            ranked = self.reshaped(ranked, -1, moe.n_experts)
        _, chosen = file.nodes("TopK", ranked, self.whole(moe.top_k), n=2, axis=-1)
        shares = file.node("GatherElements", scores, chosen, axis=1)
        if moe.normalised:
            total = file.node("Add", file.node("ReduceSum", shares, self.whole(1), keepdims=1), self.number(1e-20, full))
            shares = file.node("Div", shares, total)
        if moe.share_scale != 1.0:
            shares = file.node("Mul", shares, self.number(moe.share_scale, full))
        return (shares if self.dtype == full else self.cast(shares, self.dtype)), chosen

    def activation(self, x: str) -> str:
        if self.spec.activation == "silu":
            return self.file.node("Mul", x, self.file.node("Sigmoid", x))
        return self.file.node("Gelu", x, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none")

    def block(self, x: str, layer: int) -> str:
        """As ``model.decoder.Block``: what attention adds, then what the MLP adds, or both of the same ``x``."""
        away, name = self.spec.departures, f"blocks.{layer}"
        if away.one_norm:
            normed = self.norm(x, f"{name}.attn_norm")
            added = (self.attention(normed, layer), self.mlp(normed, layer))
            for one in added:
                x = self.file.node("Add", x, self.times(one, away.residual_scale))
            return x
        before = x
        for kind, branch in (("attn", self.attention), ("mlp", self.mlp)):
            read = before if away.parallel_block else x
            y = branch(read if away.norms_after else self.norm(read, f"{name}.{kind}_norm"), layer)
            y = self.norm(y, f"{name}.{kind}_norm") if away.norms_after else y
            y = self.norm(y, f"{name}.{kind}_post_norm") if away.norms_around else y
            x = self.file.node("Add", x, self.times(y, away.residual_scale))
        return x


def in_blocks(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes (n, k/32, 4·bits) uint8, scales (n, k/32)) of ``weight`` (n, k), as ``MatMulNBits`` reads them without zero
    points: a number is scale·(code − 2^(bits−1)), two codes of 4 bits in a byte, the first in its low half. Rows are
    filled up with zeros. The number farthest from zero gets the lowest code, and so is exact."""
    n, k = weight.shape
    middle = 2 ** (bits - 1)
    blocks = torch.nn.functional.pad(weight, (0, -k % BLOCK)).view(n, -1, BLOCK)
    farthest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    scales = farthest / -middle
    codes = (blocks / torch.where(scales == 0, 1.0, scales)).round_().add_(middle).clamp_(0, 2 * middle - 1).to(torch.uint8)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous(), scales.squeeze(-1)


def of_blocks(codes: Tensor, scales: Tensor, bits: int, k: int) -> Tensor:
    """The fp32 numbers (n, k) that ``in_blocks`` stands for."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return ((codes.float() - 2 ** (bits - 1)) * scales[..., None]).flatten(1)[:, :k]


def _genai_config(spec: ModelSpec) -> dict[str, object]:
    """What onnxruntime-genai reads. Its type "llama" is any decoder with these inputs."""
    end = list(spec.eos_token_ids) or [spec.vocab_size - 1]
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": GRAPH,
        "head_size": spec.head_dim,
        "hidden_size": spec.d_model,
        "num_attention_heads": spec.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
        "inputs": {
            "input_ids": "input_ids", "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
    }  # fmt: skip
    model = {
        "type": "llama", "context_length": spec.max_positions, "vocab_size": spec.vocab_size, "decoder": decoder,
        "bos_token_id": end[0] if spec.bos_token_id is None else spec.bos_token_id, "eos_token_id": end, "pad_token_id": end[0],
    }  # fmt: skip
    search = {"do_sample": False, "max_length": spec.max_positions, "num_beams": 1, "past_present_share_buffer": False}
    return {"model": model, "search": search}
