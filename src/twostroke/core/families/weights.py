"""How a family names its weights in a checkpoint, beside the canonical names that decoder, engine, training and interop share.

The table is data, so both directions, the strict check of names and shapes, and the count of bytes follow from it, and a model
larger than memory is converted one tensor at a time (``twostroke.model.families``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from twostroke.core.matrices import Matrix, Norm, Vector, block, has_norm_bias, head_matrix
from twostroke.core.spec import ModelSpec


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts on disk, below the layer.

    ``gate``, ``up`` and ``down`` have {} for an expert's number; with ``gate_up`` one tensor (experts, outputs, inputs) holds
    all of them, and another under ``down``. Those may be ``transposed``, (experts, inputs, outputs), with gate and up
    ``interleaved``. ``stacked``: ``gate``, ``up`` and ``down`` are a tensor each, (experts, outputs, inputs). ``shared`` is
    what comes before the shared experts' gate_proj, up_proj and down_proj, or has {} for gate, up and down. ``weight`` and
    ``bias`` end the names of matrices. ``together`` is the module that holds all experts in transformers 5, with a parameter
    gate_up_proj and one down_proj, as adapters name them.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    gate_up: str = ""
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    transposed: bool = False
    interleaved: bool = False
    stacked: bool = False
    weight: str = ".weight"
    bias: str = ".bias"
    together: str = "mlp.experts"

    def modules(self, matrix: Matrix) -> tuple[tuple[str, int], ...]:
        """(name, outputs) of the modules of shared experts, or of the parameter that holds ``matrix`` of all chosen ones."""
        if matrix.copies > 1:
            return ((f"{self.together}.{matrix.name.removeprefix('expert_')}_proj", matrix.n),)
        form = self.shared if "{}" in self.shared else f"{self.shared}.{{}}_proj"
        return tuple((form.format(part.removeprefix("shared_")), n) for part, n in matrix.parts)

    def parts(self, matrix: Matrix, kind: str) -> tuple[tuple[str, int], ...]:
        """(name, rows) of each tensor that holds a part of ``matrix``'s weight or bias, in the order of its rows."""
        if matrix.name in ("router", "shared_gate"):
            return ((f"{getattr(self, matrix.name)}.{kind}", matrix.n),)
        if matrix.copies == 1:
            return tuple((f"{name}.{kind}", n) for name, n in self.modules(matrix))
        ending = self.weight if kind == "weight" else self.bias
        if self.gate_up:
            name = self.down if matrix.name == "expert_down" else self.gate_up
            return ((name + ending, matrix.rows),)
        each = matrix.packed or (("down", matrix.n),)
        if self.stacked:
            return tuple((getattr(self, part) + ending, matrix.copies * n) for part, n in each)
        return tuple((getattr(self, part).format(i) + ending, n) for i in range(matrix.copies) for part, n in each)


@dataclass(frozen=True)
class WeightNames:
    """Names on disk. ``block`` has those of a layer's matrices and norms, below the layer: of a matrix as a whole where the
    family packs it alike, else of its parts. ``base`` is what a checkpoint of the bare model leaves out.

    ``block``'s "k_b" and "v_b", where it has them: what makes keys and values of a latent is stored as two tensors, (heads,
    inputs, outputs) for keys and (heads, outputs, inputs) for values.

    ``transposed``: matrices are stored as (inputs, outputs), as GPT-2's Conv1D does. ``qkv_by_group``: the packed projection is
    stored group by group, the queries of a key head, its key and its value.
    """

    base: str
    layer: str
    embed: str
    final_norm: str
    block: Mapping[str, str]
    positions: str = ""
    head: str = "lm_head"
    transposed: bool = False
    qkv_by_group: bool = False
    experts: ExpertNames = ExpertNames()

    def parts(self, matrix: Matrix) -> tuple[tuple[str, int], ...]:
        """(name below the layer, outputs) of what ``matrix`` is stored as; nothing where the names are not known."""
        if matrix.chooses:
            return ()
        if matrix.name.startswith(("expert_", "shared_")):
            return self.experts.modules(matrix)
        name = matrix.name
        if name in self.block:
            return ((self.block[name], matrix.n),)
        return tuple((self.block[part], n) for part, n in matrix.parts if part in self.block)


LLAMA_WEIGHTS = WeightNames(
    base="model.",
    layer="model.layers",
    embed="model.embed_tokens",
    final_norm="model.norm",
    block={
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_a": "self_attn.q_a_proj",
        "q_b": "self_attn.q_b_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa",
        "kv_b": "self_attn.kv_b_proj",
        "out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "q_a_norm": "self_attn.q_a_layernorm",
        "kv_a_norm": "self_attn.kv_a_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
)
"""``LlamaForCausalLM``, which most families follow: what differs (windows, biases, QK-norm) is in the spec."""

GPT2_WEIGHTS = WeightNames(
    base="transformer.",
    layer="transformer.h",
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    block={
        "qkv": "attn.c_attn",  # holds queries, keys and values in the canonical order already
        "out": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "attn_norm": "ln_1",
        "mlp_norm": "ln_2",
    },
    transposed=True,
)

GPT_BIGCODE_WEIGHTS = replace(GPT2_WEIGHTS, transposed=False, qkv_by_group=True)
GPT_NEO_WEIGHTS = replace(
    GPT2_WEIGHTS,
    transposed=False,
    block={
        **{part: f"attn.attention.{part}_proj" for part in ("q", "k", "v", "out")},
        **{part: name for part, name in GPT2_WEIGHTS.block.items() if part not in ("qkv", "out")},
    },
)


def _like_llama(**block: str) -> WeightNames:
    return replace(LLAMA_WEIGHTS, block={**LLAMA_WEIGHTS.block, **block})


OLMO2_WEIGHTS = _like_llama(attn_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")
GEMMA2_WEIGHTS = _like_llama(
    attn_post_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm", mlp_post_norm="post_feedforward_layernorm"
)
GLM4_WEIGHTS = _like_llama(
    gate_up="mlp.gate_up_proj", attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)
PHI_WEIGHTS = _like_llama(out="self_attn.dense", up="mlp.fc1", down="mlp.fc2")
PHI3_WEIGHTS = _like_llama(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
STARCODER2_WEIGHTS = _like_llama(up="mlp.c_fc", down="mlp.c_proj")
GPT_NEOX_WEIGHTS = WeightNames(
    base="gpt_neox.",
    layer="gpt_neox.layers",
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    block={
        "qkv": "attention.query_key_value",
        "out": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    qkv_by_group=True,
)
FALCON_WEIGHTS = WeightNames(
    base="transformer.",
    layer="transformer.h",
    embed="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    block={
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "attn_norm": "ln_attn",
        "mlp_norm": "ln_mlp",
    },
    qkv_by_group=True,
)

MIXTRAL_WEIGHTS = replace(
    LLAMA_WEIGHTS,
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
    ),
)
MINIMAX_WEIGHTS = replace(
    MIXTRAL_WEIGHTS, experts=replace(MIXTRAL_WEIGHTS.experts, correction_bias="block_sparse_moe.e_score_correction_bias")
)
QWEN2_MOE_WEIGHTS = replace(LLAMA_WEIGHTS, experts=ExpertNames(shared="mlp.shared_expert"))
GRANITE_MOE_WEIGHTS = replace(
    LLAMA_WEIGHTS,
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        gate_up="block_sparse_moe.input_linear",
        down="block_sparse_moe.output_linear",
        together="block_sparse_moe.experts",
    ),
)
GPT_OSS_WEIGHTS = replace(
    _like_llama(sinks="self_attn.sinks"),
    experts=ExpertNames(
        router="mlp.router",
        gate_up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        transposed=True,
        interleaved=True,
        weight="",
        bias="_bias",
    ),
)


@dataclass(frozen=True)
class Part:
    """One stored tensor: its name on disk and how many rows of the canonical tensor it holds. ``transposed``: it is stored with
    inputs before outputs."""

    name: str
    rows: int
    transposed: bool = False


@dataclass(frozen=True)
class Entry:
    """One canonical tensor and the stored tensors whose rows it is made of. ``matrix`` where it is the weight of a block's.

    ``by_group`` (groups, heads of a group): its rows, heads of equal size, are stored group by group and held by place in the
    group: first all but the last two heads of every group, then the last but one of each, then the last.

    ``copies``: each part is a tensor of so many matrices, whose rows are held one after another, a matrix's of all parts
    together. With ``interleaved`` the
    rows of a matrix are stored by turns of its first and its second half.
    """

    canonical: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    transposed: bool = False
    matrix: Matrix | None = None
    by_group: tuple[int, int] | None = None
    copies: int = 1
    interleaved: bool = False

    def turns(self, part: Part) -> bool:
        """Whether a matrix of ``part`` is stored with inputs before outputs."""
        return self.transposed or part.transposed

    def stored_shape(self, part: Part) -> tuple[int, ...]:
        shape = (part.rows // self.copies, *self.shape[1:])
        shape = shape[::-1] if self.turns(part) else shape
        return shape if self.copies == 1 else (self.copies, *shape)


def _whole(canonical: str, stored: str, *shape: int) -> Entry:
    return Entry(canonical, shape, (Part(stored, shape[0]),))


def tensors(spec: ModelSpec, names: WeightNames) -> Iterator[Entry]:
    """Every tensor of a model of ``spec``, which must be buildable, canonical beside stored."""
    kinds = ("weight", "bias") if has_norm_bias(spec) else ("weight",)
    groups = (spec.n_kv_heads, spec.queries_per_kv_head + 2) if names.qkv_by_group else None
    yield _whole("embed.weight", f"{names.embed}.weight", spec.vocab_size, spec.d_model)
    if spec.positions == "learned":
        yield _whole("position_embed.weight", f"{names.positions}.weight", spec.max_positions, spec.d_model)
    for i in range(spec.n_layers):
        ours, theirs = f"blocks.{i}", f"{names.layer}.{i}"
        for part in block(spec, i):
            if isinstance(part, Norm):
                for kind in kinds:
                    yield _whole(f"{ours}.{part.module}.{kind}", f"{theirs}.{names.block[part.name]}.{kind}", part.n)
            elif isinstance(part, Vector):
                stored = names.block.get(part.name, names.experts.correction_bias)
                yield _whole(f"{ours}.{part.module}", f"{theirs}.{stored}", part.n)
            elif part.copies > 1 or part.chooses or part.name.startswith("shared_"):
                yield from _of_experts(part, names.experts, ours, theirs)
            elif part.name == "kv_b" and "k_b" in names.block:
                yield _by_head(spec, part, names, ours, theirs)
            else:
                yield from _of_matrix(part, names, ours, theirs, groups if part.name == "qkv" else None)
    for kind in kinds:
        yield _whole(f"final_norm.{kind}", f"{names.final_norm}.{kind}", spec.d_model)
    if not spec.tied_embeddings:
        head = head_matrix(spec)
        yield _whole("head.weight", f"{names.head}.weight", head.n, head.k)


def _kinds(matrix: Matrix) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(weight or bias, inputs of a row) of the tensors that ``matrix`` has."""
    return (("weight", (matrix.k,)), ("bias", ())) if matrix.bias else (("weight", (matrix.k,)),)


def _of_matrix(matrix: Matrix, names: WeightNames, ours: str, theirs: str, by_group: tuple[int, int] | None) -> Iterator[Entry]:
    for kind, columns in _kinds(matrix):
        stored = tuple(Part(f"{theirs}.{name}.{kind}", rows) for name, rows in names.parts(matrix))
        is_weight = kind == "weight"
        yield Entry(
            f"{ours}.{matrix.module}.{kind}", (matrix.n, *columns), stored,
            names.transposed and is_weight, matrix if is_weight else None, by_group,
        )  # fmt: skip


def _by_head(spec: ModelSpec, matrix: Matrix, names: WeightNames, ours: str, theirs: str) -> Entry:
    """Every head's keys, then its values: two tensors on disk."""
    assert spec.mla is not None
    keys = Part(f"{theirs}.{names.block['k_b']}.weight", spec.n_heads * spec.mla.qk_nope_dim, transposed=True)
    values = Part(f"{theirs}.{names.block['v_b']}.weight", spec.n_heads * spec.mla.v_dim)
    shape = (matrix.n, matrix.k)
    return Entry(f"{ours}.{matrix.module}.weight", shape, (keys, values), matrix=matrix, copies=spec.n_heads)


def _of_experts(matrix: Matrix, names: ExpertNames, ours: str, theirs: str) -> Iterator[Entry]:
    """Experts, shared ones, or what chooses among them."""
    together = matrix.copies > 1 and (names.gate_up != "" or names.stacked)
    for kind, columns in _kinds(matrix):
        stored = tuple(Part(f"{theirs}.{name}", rows) for name, rows in names.parts(matrix, kind))
        is_weight = kind == "weight"
        yield Entry(
            f"{ours}.{matrix.module}.{kind}", (matrix.rows, *columns), stored,
            names.transposed and together and is_weight, matrix if is_weight and not matrix.chooses else None,
            copies=matrix.copies if together else 1, interleaved=names.interleaved and together and len(matrix.packed) > 1,
        )  # fmt: skip
