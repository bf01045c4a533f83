"""Writes a decoder as an ONNX graph with its KV cache as inputs and outputs, for onnxruntime and onnxruntime-genai.

It is emitted from the spec, operation by operation as ``model.decoder`` computes them, so every dense family is one code.
Inputs: ``input_ids`` (B, T), ``attention_mask`` (B, S) of the S tokens that are cached and new, padding in front,
``past_key_values.i.key`` and ``.value`` (B, K, S − T, D). Outputs: ``logits`` (B, T, V) in fp32, ``present.i.key`` and
``.value`` (B, K, S, D). B, T and S are free. Operations are those of ONNX's opset 20, but for matrices in codes:
``MatMulNBits`` of onnxruntime's contrib operations (github.com/microsoft/onnxruntime, docs/ContribOperators.md).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import ConfigError
from twostroke.core.families import config_from_spec
from twostroke.core.matrices import attention_matrices, block_matrices, has_norm_bias, head_norms, qkv_rows
from twostroke.core.spec import ModelSpec
from twostroke.core.version import __version__
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.onnx_file import CONTRIB, ELEMENT_TYPES, OnnxFile
from twostroke.model.norm import norm_offset
from twostroke.model.rope import angles, by_halves
from twostroke.model.save import generation_config, write_json, write_tokenizer

GRAPH, DATA, GENAI = "model.onnx", "model.onnx.data", "genai_config.json"
BLOCK = 32
"""Numbers that share a scale in ``MatMulNBits``."""
_BITS = {"int8": (8, 8), "int4": (4, 8)}
"""Of the blocks' matrices and of the head's."""
_ACCURACY = 4
"""Of ``MatMulNBits`` in onnxruntime: inputs are rounded to int8. With 1, fp32, a row times 2048 × 2048 codes takes 0.30 ms
instead of 0.09 in int4 and 5.7 instead of 0.07 in int8, for which it has no kernel (onnxruntime 1.32, two cores of a Zen 4)."""


def require_dense(spec: ModelSpec) -> None:
    """Raise ConfigError for a model with experts or latent attention, which the graph does not have."""
    for there, words in ((spec.moe, "experts"), (spec.mla, "latent attention")):
        if there is not None:
            raise ConfigError(f"ONNX graphs are written of dense models, and this {spec.family} model has {words}.")


def write_onnx(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with the graph, its weights, the tokenizer and the configuration of onnxruntime-genai. In fp32 and fp16
    everything is of that type; in int8 and int4 matrices are codes, the head always of 8 bits, and the rest is fp32. Memory:
    one matrix. Raises ConfigError for a model that is not dense."""
    spec = source.spec
    require_dense(spec)
    with (out / DATA).open("wb") as stream:
        graph = _Graph(source, OnnxFile(stream, DATA), precision)
        graph.decoder()
        graph.file.save(out / GRAPH, spec.family, f"twostroke {__version__}")
    write_json(out / "config.json", config_from_spec(spec, TORCH_NAMES[precision if precision == "fp16" else "fp32"]))
    write_json(out / "generation_config.json", generation_config(spec))
    write_json(out / GENAI, _genai_config(spec))
    if source.tokenizer is not None:
        write_tokenizer(source.tokenizer, spec, out)
    if any(rope.scaling in ("longrope", "dynamic") for rope in spec.ropes):
        return (f"the angles of {spec.rope.scaling} positions are those of the longest context, {spec.max_positions} tokens.",)
    return ()


class _Graph:
    def __init__(self, source: ExportSource, file: OnnxFile, precision: str) -> None:
        self.spec, self.state, self.file = source.spec, source.state, file
        self.bits = _BITS.get(precision)
        self.dtype = torch.float16 if precision == "fp16" else torch.float32
        order = torch.arange(self.spec.head_dim)
        self.order = by_halves(order, self.spec) if self.spec.ropes else order

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
        weight = self.state[f"{name}.weight"].float()
        weight = weight if rows is None else weight[rows]
        label = "head.weight" if head else f"{name}.weight"
        if self.bits is None:
            y = self.file.node("MatMul", x, self.file.weight(label, weight.t().to(self.dtype)))
        else:
            y = self.coded_product(x, weight, label, self.bits[head])
        if not bias:
            return y
        vector = self.state[f"{name}.bias"]
        return self.file.node("Add", y, self.vector(f"{name}.bias", vector if rows is None else vector[rows]))

    def coded_product(self, x: str, weight: Tensor, label: str, bits: int) -> str:
        codes, scales = in_blocks(weight, bits)
        n, k = weight.shape
        inputs = (self.file.weight(label, codes), self.file.weight(f"{label}.scales", scales.flatten()))
        return self.file.node(
            "MatMulNBits", x, *inputs, domain=CONTRIB, K=k, N=n, bits=bits, block_size=BLOCK, accuracy_level=_ACCURACY
        )

    def vector(self, name: str, value: Tensor) -> str:
        return self.file.weight(name, value.to(self.dtype))

    def norm(self, x: str, name: str, weight: Tensor | None = None) -> str:
        """The norm ``name`` over the last dimension, computed in fp32."""
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
            root = file.node("Sqrt", file.node("Add", mean, self.number(spec.norm_eps, full)))
            y = file.node("Mul", file.node("Div", wide, root), file.weight(f"{name}.weight", held))
        return y if self.dtype == full else self.cast(y, self.dtype)

    def decoder(self) -> None:
        spec, file, away = self.spec, self.file, self.spec.departures
        ids = file.input("input_ids", torch.int64, ("batch", "tokens"))
        self.attention_mask = file.input("attention_mask", torch.int64, ("batch", "all_tokens"))
        file.output("logits", torch.float32, ("batch", "tokens", spec.vocab_size))
        self.positions_and_masks(ids)
        table = self.state["embed.weight"]
        held = file.weight("embed.weight", table.to(self.dtype if self.bits is None else torch.float16))
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
            turned, magnitudes = file.node("Mul", wide, file.constant(found.frequencies)), file.constant(found.magnitudes)
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

    def attention(self, x: str, layer: int) -> str:
        spec, file, name = self.spec, self.file, f"blocks.{layer}"
        h, k, d = spec.n_heads, spec.n_kv_heads, spec.head_dim
        qkv, out = attention_matrices(spec)
        packed = self.product(x, f"{name}.{qkv.module}", qkv.bias, self.head_rows())
        q, key, value = file.nodes("Split", packed, self.whole(h * d, k * d, k * d), n=3, axis=-1)
        if spec.qk_norm:
            q_norm, k_norm = head_norms(spec)
            q = self.normed_heads(q, f"{name}.{q_norm.module}", h)
            key = self.normed_heads(key, f"{name}.{k_norm.module}", k)
        q, key = (self.rotated(self.reshaped(one, 0, 0, n, d), layer) for one, n in ((q, h), (key, k)))
        cached = []
        for kind, new in (("key", key), ("value", self.reshaped(value, 0, 0, k, d))):
            past = file.input(f"past_key_values.{layer}.{kind}", self.dtype, ("batch", k, "cached_tokens", d))
            now = f"present.{layer}.{kind}"
            file.node("Concat", past, file.node("Transpose", new, perm=(0, 2, 1, 3)), name=now, axis=2)
            file.output(now, self.dtype, ("batch", k, "all_tokens", d))
            cached.append(file.node("Unsqueeze", now, self.whole(2)))  # (B, K, 1, S, D)
        q = self.times(file.node("Transpose", q, perm=(0, 2, 1, 3)), spec.attention_scale)
        q = self.reshaped(q, 0, k, h // k, -1, d)  # (B, K, G, T, D)
        scores = file.node("MatMul", q, file.node("Transpose", cached[0], perm=(0, 1, 2, 4, 3)))
        scores = self.capped(scores, spec.departures.attention_cap)
        shares = file.node("Softmax", file.node("Add", scores, self.masks[spec.window_of_layer(layer)]), axis=-1)
        mixed = self.reshaped(file.node("MatMul", shares, cached[1]), 0, h, -1, d)
        mixed = self.reshaped(file.node("Transpose", mixed, perm=(0, 2, 1, 3)), 0, 0, h * d)
        return self.product(mixed, f"{name}.{out.module}", out.bias)

    def mlp(self, x: str, layer: int) -> str:
        spec, name = self.spec, f"blocks.{layer}"
        *_, up, down = block_matrices(spec)
        wide = self.product(x, f"{name}.{up.module}", up.bias)
        if spec.mlp == "swiglu":
            gate, other = self.file.nodes("Split", wide, n=2, axis=-1, num_outputs=2)
            wide = self.file.node("Mul", self.activation(gate), other)
        else:
            wide = self.activation(wide)
        return self.product(wide, f"{name}.{down.module}", down.bias)

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
