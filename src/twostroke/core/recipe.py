"""``TrainRecipe``: a training run as a TOML file. Unknown keys, wrong types and impossible values are errors with a sentence.

Example::

    method = "pretrain"
    output = "runs/demo"
    [model]
    size = "auto"
    [data]
    sources = ["stdlib"]
    vocab_size = 4096
    [train]
    budget_s = 300
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twostroke.core.checks import MOST_WHOLE
from twostroke.core.data_recipe import STDLIB_SOURCE, DataRecipe, check_vocab_size
from twostroke.core.documents import is_integer, read_toml
from twostroke.core.engines import Method
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import spec_from_config
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.parallel_recipe import CUTS, ParallelRecipe
from twostroke.core.policy import NF4_BLOCK
from twostroke.core.spec import ModelSpec
from twostroke.core.tables import build
from twostroke.core.train_settings import TrainSettings, check_update, with_default_rates

MAX_NF4_BLOCK = 2**16
"""Each matrix is filled up to whole blocks: longer ones would take more memory than the matrix."""


@dataclass(frozen=True)
class ModelRecipe:
    """Where the model comes from: ``size = "auto"`` (the planner picks for ``train.budget_s``), ``init_from`` (a model
    directory), or the sizes themselves with ``size = "explicit"``. Sizes left at 0 under "explicit" are an error."""

    size: Literal["auto", "explicit"] = "explicit"
    init_from: str | None = None
    family: str = "llama"
    n_layers: int = 0
    d_model: int = 0
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    d_ff: int = 0
    max_positions: int = 0  # 0: train.sequence_length
    tied_embeddings: bool = True
    rope_theta: float = 10_000.0
    dropout: float = 0.0
    n_experts: int = 8  # of a layer, in families with experts
    top_k: int = 2  # that a token passes
    d_expert: int = 0  # width of one; 0: d_ff

    def sized_as(self, spec: ModelSpec) -> ModelRecipe:
        """The sizes of ``spec``, which the planner picked; family, tying, rotary base and dropout stay the recipe's."""
        names = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")
        return dataclasses.replace(self, **{name: getattr(spec, name) for name in names})


@dataclass(frozen=True)
class LoraRecipe:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W·x + ``alpha``/``rank`` · B·A·dropout(x), W itself frozen.

    ``targets`` are modules by their names on disk (``q_proj``, ``mlp.c_proj``), or "all-linear" for every matrix of the
    blocks but those of experts, which are ``experts.gate_up_proj`` and ``experts.down_proj`` in every family. Under
    method = "qlora" (Dettmers et al. 2023, arXiv:2305.14314) all matrices of the blocks are held in NF4, 4 bits and one scale
    for each ``nf4_block`` values; ``double_quantization`` holds those scales in 8 bits.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    nf4_block: int = NF4_BLOCK
    double_quantization: bool = True


@dataclass(frozen=True)
class TrainRecipe:
    """``method``: "pretrain" from fresh weights or from a model, "full" fine-tunes all weights of ``model.init_from``, "lora"
    and "qlora" train adapters beside them. ``[lora]`` is read by the latter two. Without ``[parallel]`` one process trains."""

    method: Method = "pretrain"
    seed: int = 0
    output: str = "runs/train"
    model: ModelRecipe = field(default_factory=ModelRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    train: TrainSettings = field(default_factory=TrainSettings)
    lora: LoraRecipe = field(default_factory=LoraRecipe)
    parallel: ParallelRecipe | None = None

    @property
    def trains_adapters(self) -> bool:
        return self.method in ("lora", "qlora")

    def __post_init__(self) -> None:
        t = self.train
        if (t.steps > 0) == (t.budget_s > 0):
            raise ConfigError(f"give exactly one of train.steps={t.steps} and train.budget_s={t.budget_s:g}, above 0.")
        for name in ("batch_size", "sequence_length", "grad_accumulation", "keep_checkpoints", "anomaly_limit"):
            _at_least(f"train.{name}", getattr(t, name), 1)
        for name in (
            "steps",
            "budget_s",
            "checkpoint_every",
            "keep_every",
            "evaluate_every",
            "diagnostics_every",
            "sample_every",
        ):
            _at_least(f"train.{name}", getattr(t, name), 0)
        check_update(t)
        object.__setattr__(self, "train", with_default_rates(t, self.method))
        if t.sequence_length < 2:
            raise ConfigError(f"train.sequence_length={t.sequence_length} must be at least 2.")
        if t.spike_factor != 0 and not 1 < t.spike_factor < float("inf"):
            raise ConfigError(
                f"train.spike_factor={t.spike_factor:g} must be above 1: times the median at which a step is a spike. "
                "0 looks for none."
            )
        if t.anomaly_policy == "rollback" and not t.checkpoint_every:
            raise ConfigError(
                'train.anomaly_policy="rollback" goes back to the newest checkpoint: set train.checkpoint_every above 0.'
            )
        if not self.data.sources:
            raise ConfigError('data.sources is empty. Name files, folders, globs or "stdlib".')
        if not 0 < self.data.held_out_fraction < 1:
            raise ConfigError(f"data.held_out_fraction={self.data.held_out_fraction} must be between 0 and 1.")
        if self.data.tokenizer is None:
            check_vocab_size(self.data.vocab_size, "data.vocab_size")
        m = self.model
        if self.method != "pretrain" and m.init_from is None:
            raise ConfigError(
                f'method="{self.method}" fine-tunes an existing model: give model.init_from, or use method="pretrain".'
            )
        if m.init_from is None and m.size == "explicit":
            for name in ("n_layers", "d_model", "n_heads", "d_ff"):
                _at_least(f"model.{name}", getattr(m, name), 1)
        if m.init_from is None and m.size == "auto" and t.budget_s <= 0:
            raise ConfigError(
                'model.size="auto" needs train.budget_s: the planner picks the size that a time budget can train.'
            )
        self._check_samples()
        self._check_conversations()
        self._check_lora()
        self._check_parallel()

    def _check_samples(self) -> None:
        t = self.train
        if (t.sample_every > 0) != bool(t.sample_prompts):
            raise ConfigError(
                f"train.sample_every={t.sample_every} and train.sample_prompts={list(t.sample_prompts)!r} go together: how "
                "often texts are written, and what they continue. Give both or none."
            )
        if not all(t.sample_prompts):
            raise ConfigError("train.sample_prompts holds an empty text: there is nothing to continue. Give it a few words.")

    def _check_conversations(self) -> None:
        d = self.data
        if d.layout == "text":
            if d.chat_template is not None:
                raise ConfigError(
                    f'data.chat_template={d.chat_template!r} renders conversations, and data.layout is "text". '
                    'Set data.layout to "messages", "alpaca", "sharegpt" or "prompt".'
                )
            return
        if STDLIB_SOURCE in d.sources:
            raise ConfigError(
                f'data.layout="{d.layout}" reads conversations, and data.sources names "{STDLIB_SOURCE}", which is source '
                "code. Name .json or .jsonl files."
            )
        if self.model.init_from is None and d.tokenizer is None:
            raise ConfigError(
                f'data.layout="{d.layout}" needs a tokenizer that knows the template\'s special tokens: give model.init_from, '
                "or data.tokenizer."
            )

    def _check_lora(self) -> None:
        lora = self.lora
        _at_least("lora.rank", lora.rank, 1)
        if not 0 < lora.alpha < float("inf"):
            raise ConfigError(f"lora.alpha={lora.alpha} must be above 0 and finite.")
        if not 0 <= lora.dropout < 1:
            raise ConfigError(f"lora.dropout={lora.dropout} must be at least 0 and less than 1.")
        if not lora.targets:
            raise ConfigError(f'lora.targets is empty. Name modules such as "q_proj", or "{ALL_LINEAR}".')
        check_nf4_block("lora.nf4_block", lora.nf4_block)
        if not self.trains_adapters and lora != LoraRecipe():
            raise ConfigError(f'[lora] is set, but method="{self.method}" trains no adapters. Use method="lora" or "qlora".')

    def _check_parallel(self) -> None:
        if self.parallel is None:
            return
        self._check_less_traffic(self.parallel)
        self._check_offload(self.parallel)
        if self.parallel.is_auto and self.model.init_from is None and self.model.size == "auto":
            raise ConfigError(
                'parallel.layout="auto" is planned for a model that is known, and model.size="auto" leaves it open. Give the '
                "sizes, or the layout."
            )
        for cut in CUTS:
            if getattr(self.parallel, cut) > 1:
                self._check_cut(self.parallel, cut)

    def _check_cut(self, parallel: ParallelRecipe, cut: str) -> None:
        t = self.train
        whole = {"context": "sequence", "expert": "set of experts", "pipeline": "model"}.get(cut, "matrix")
        remedy = f"Use parallel.{cut}=1, which keeps each {whole} on one rank."
        moves_whole = t.optimizer in ("muon", "lamb")
        rounds_pieces = {
            'train.dtype="pure_bf16" rounds each pass\'s gradients to bf16': t.dtype == "pure_bf16" and cut == "shard",
            f'train.dtype="pure_bf16" beside optimizer="{t.optimizer}" sends fp32': t.dtype == "pure_bf16" and moves_whole,
        }
        cuts_channels = {f"train.diagnostics_every={t.diagnostics_every} looks at all channels": t.diagnostics_every > 0}
        cuts_sequences = {f"train.layer_dropout={t.layer_dropout:g} leaves out rows": t.layer_dropout > 0}
        needs_all_layers = {f"train.exit_loss={t.exit_loss:g} reads earlier layers": t.exit_loss > 0}
        refused: dict[str, bool] = {}
        refused |= rounds_pieces if cut not in ("context", "pipeline") else {}
        refused |= cuts_channels if cut == "tensor" else {}
        refused |= cuts_sequences if cut in ("context", "tensor", "pipeline") else {}
        refused |= needs_all_layers if cut in ("tensor", "pipeline") else {}
        for what, asked in refused.items():
            if asked:
                raise ConfigError(
                    f"{what}, which parallel.{cut}={getattr(parallel, cut)} cannot do on parts of a {whole}. {remedy}"
                )

    def _check_offload(self, parallel: ParallelRecipe) -> None:
        t = self.train
        keys = {"offload_optimizer": t.offload_optimizer, "offload_activations": t.offload_activations}
        layouts = {f"parallel.{cut}={getattr(parallel, cut)}": getattr(parallel, cut) > 1 for cut in CUTS}
        layouts[f'parallel.compress="{parallel.compress}"'] = parallel.compress != "none"
        layouts[f"parallel.outer_every={parallel.outer_every}"] = parallel.outer_every > 0
        for layout, asked in layouts.items():
            for key, place in keys.items():
                if asked and place != "none":
                    raise ConfigError(
                        f'train.{key}="{place}" works with one process or with whole replicas (parallel.data), not yet with '
                        f"{layout}. Leave one of them out."
                    )

    def _check_less_traffic(self, parallel: ParallelRecipe) -> None:
        t = self.train
        if parallel.feeds_back and t.dtype == "fp16" and not parallel.outer_every:
            raise ConfigError(
                f'parallel.compress="{parallel.compress}" keeps what rounding left out for the next step, and '
                'train.dtype="fp16" changes the scale of gradients between steps. Use train.dtype="bf16", or '
                "parallel.error_feedback=false."
            )
        if parallel.compress_weights != "none" and t.ema_decay > 0 and t.evaluate_every > 0:
            raise ConfigError(
                f"train.evaluate_every={t.evaluate_every} scores the averages of train.ema_decay={t.ema_decay:g} too, and with "
                f'parallel.compress_weights="{parallel.compress_weights}" ranks send each other differences alone. Leave one '
                "of the three out."
            )
        refused = {
            f'method="{self.method}" trains adapters': self.trains_adapters,
            'train.dtype="pure_bf16" rounds weights by random numbers': t.dtype == "pure_bf16",
            f"train.ema_decay={t.ema_decay:g} averages weights that all replicas have": t.ema_decay > 0,
        }
        for what, asked in refused.items():
            if asked and parallel.outer_every:
                raise ConfigError(
                    f"{what}, which replicas that train apart by parallel.outer_every={parallel.outer_every} cannot do. Leave "
                    "one of them out."
                )


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        finite = " and finite" if isinstance(value, float) else ""
        raise ConfigError(f"{name}={value} must be at least {least}{finite}.")
    if value > MOST_WHOLE:
        raise ConfigError(f"{name}={value} must be at most {MOST_WHOLE:,}.")


def check_nf4_block(where: str, block: Any) -> int:
    """``block``, where it is a number of values that may share one scale of NF4; ConfigError that names ``where`` otherwise."""
    if not is_integer(block) or not 2 <= block <= MAX_NF4_BLOCK or block % 2:
        raise ConfigError(
            f"{where}={block!r:.100} must be even, because two codes share a byte, and from 2 to {MAX_NF4_BLOCK}."
        )
    return block


def recipe_from_dict(table: dict[str, Any]) -> TrainRecipe:
    return build(TrainRecipe, table, "recipe")


def data_recipe_from_dict(table: dict[str, Any]) -> DataRecipe:
    """The ``[data]`` section alone, as a command's options or a stored recipe have it."""
    return build(DataRecipe, table, "recipe", "data")


def spec_from_recipe(
    model: ModelRecipe, vocab_size: int, sequence_length: int, eos_token_ids: tuple[int, ...] = ()
) -> ModelSpec:
    """The ``ModelSpec`` that a recipe's explicit sizes describe, with its family's own norms, biases and positions.

    Left at 0: ``n_kv_heads`` is ``n_heads``, ``head_dim`` is ``d_model`` / ``n_heads``, ``max_positions`` the sequence length.
    Raises ConfigError for sizes that are impossible, and for one that the family does not have.
    """
    kv_heads = model.n_kv_heads or model.n_heads
    max_positions = model.max_positions or sequence_length
    if max_positions < sequence_length:
        raise ConfigError(
            f"train.sequence_length={sequence_length} must be at most model.max_positions={max_positions}. Raise the latter."
        )
    if not model.head_dim and model.d_model % max(1, model.n_heads):
        raise ConfigError(f"model.n_heads={model.n_heads} must divide model.d_model={model.d_model}, or give model.head_dim.")
    head_dim = model.head_dim or model.d_model // max(1, model.n_heads)
    sizes = {
        "n_layers": model.n_layers, "d_model": model.d_model, "d_ff": model.d_ff, "n_heads": model.n_heads,
        "n_kv_heads": kv_heads, "max_positions": max_positions, "dropout": model.dropout,
        "n_experts": model.n_experts, "top_k": model.top_k, "d_expert": model.d_expert or model.d_ff,
    }  # fmt: skip
    spelled = {key: sizes[name] for name, keys in SPELLINGS.items() for key in keys}
    spec = spec_from_config(
        spelled
        | {"model_type": model.family, "vocab_size": vocab_size, "tie_word_embeddings": model.tied_embeddings}
        # Explicit, where a family would otherwise put its own defaults: a tokenizer trained here has no such tokens.
        | {"bos_token_id": None, "eos_token_id": list(eos_token_ids) or None, "multi_query": kv_heads == 1}
        | {"head_dim": head_dim, "rms_norm_eps": 1e-5, "rope_theta": model.rope_theta, "sliding_window": None}
        # What published configs state for their own width of heads: 1/√D for any.
        | {"query_pre_attn_scalar": head_dim, "attention_multiplier": max(1, head_dim) ** -0.5}
        | {"new_decoder_architecture": True}
        # A family's groups of experts are made for its own number of experts: 8 of 8 would leave one expert in each.
        | {"n_group": 1, "topk_group": 1}
    )
    if spec.mla is None and (spec.n_kv_heads, spec.head_dim) != (kv_heads, head_dim):
        raise ConfigError(
            f"model.n_kv_heads={model.n_kv_heads}, model.head_dim={model.head_dim}: leave both out for {model.family}."
        )
    return spec


SPELLINGS = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "d_model": ("hidden_size", "n_embd"),
    "d_ff": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "dropout": ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "n_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "d_expert": ("moe_intermediate_size", "shared_expert_intermediate_size"),
}
"""A size → its keys in the ``config.json`` of all families."""


def _apply_setting(table: dict[str, Any], setting: str) -> None:
    """Apply one ``a.b=c`` to ``table``; c is read as a TOML value, and as a plain string where TOML refuses it."""
    path, separator, text = setting.partition("=")
    if not separator or not path.strip():
        raise ConfigError(f"--set {setting!r} must look like section.key=value.")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        value = text
    *sections, key = path.strip().split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {setting!r}: {section} is not a section.")
    table[key] = value


def read_recipe(path: Path | str, settings: typing.Iterable[str] = ()) -> TrainRecipe:
    """The recipe in a TOML file with ``--set`` overrides applied. Raises InputError or ConfigError."""
    file = Path(path)
    if not file.is_file():
        wrong = "is not a file" if file.exists() else "does not exist"
        raise InputError(f"recipe {file} {wrong}. Name a TOML file, such as recipes/quick.toml.")
    try:
        table = read_toml(file)
    except CorruptFileError as error:
        raise ConfigError(f"recipe {error}") from None
    for setting in settings:
        _apply_setting(table, setting)
    return recipe_from_dict(table)
