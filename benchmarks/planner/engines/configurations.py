"""What is predicted and then run: training and serving configurations of the real engines.

They differ from the shapes that calibration measures (widths 256 and 768, 1 to 6 layers, vocabularies of 4,096 and 8,192), so
that none is predicted from itself. Some are written down; each family, scheme, cache type, optimizer, type and method that the
package's tables hold and no written case has gets a case of its own, so a new row of a table is measured without a change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from twostroke.core.engines import METHODS, RECOMPUTATIONS, TRAINING_TYPES
from twostroke.core.families import FAMILIES
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.optimizers import TRAINED
from twostroke.core.sampling_kinds import DRAWN, FILTERED, LOGPROBS, PENALTIES, SAMPLING_KINDS
from twostroke.core.schemes import CACHE_TYPES, NATIVE, SCHEMES, WEIGHTS

Case = TypeVar("Case")

MULTIPLE = 64


@dataclass(frozen=True)
class Sizes:
    """A model by its sizes. ``d_ff`` 0: 8/3 of the width, to a multiple of 64."""

    name: str
    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    d_ff: int = 0
    max_positions: int = 2048

    @property
    def feed_forward(self) -> int:
        return self.d_ff or -(-8 * self.d_model // 3 // MULTIPLE) * MULTIPLE


@dataclass(frozen=True)
class TrainingCase:
    """How a model of ``sizes`` is trained. Methods other than pretrain begin with random weights on disk."""

    name: str
    sizes: Sizes
    batch_size: int
    sequence_length: int
    grad_accumulation: int = 1
    method: str = "pretrain"
    dtype: str = "bf16"
    optimizer: str = "adamw"
    compile: bool = True
    recomputation: str = "none"
    targets: tuple[str, ...] = (ALL_LINEAR,)


@dataclass(frozen=True)
class ServingCase:
    """A model under one scheme, ``batch`` requests of one prompt length decoding together; ``over_http``: as many users of a
    server. ``sampling`` is what they ask for beyond the largest logit, ``loras`` describes adapters that they name in turn, as
    ``plan serve --lora`` does; ``adapters``: the model is a directory of adapters, served merged."""

    sizes: Sizes
    scheme: str = "bf16"
    batch: int = 1
    prompt_tokens: int = 128
    output_tokens: int = 64
    head_dtype: str = "auto"
    kv_dtype: str = "auto"
    runner: str = "auto"
    sampling: tuple[str, ...] = ()
    adapters: bool = False
    loras: str = ""
    over_http: bool = False

    @property
    def name(self) -> str:
        said = {"head": self.head_dtype, "cache": self.kv_dtype, "on": self.runner}
        parts = [self.sizes.name, self.scheme, f"b{self.batch}", f"p{self.prompt_tokens}"]
        parts += [f"{what}-{value}" for what, value in said.items() if value != "auto"]
        parts += [
            *self.sampling,
            *(["adapters"] if self.adapters else []),
            *([f"lora-{self.loras}"] if self.loras else []),
            *(["http"] if self.over_http else []),
        ]
        return "-".join(parts)


def default_cases(
    written: Sequence[Case], names: Iterable[str], of: Callable[[Case], str], make: Callable[[str], Case]
) -> list[Case]:
    """``make(name)`` for each of ``names`` that no written case has."""
    had = {of(case) for case in written}
    return [make(name) for name in names if name not in had]


# -- training -------------------------------------------------------------------------------------------------------------


def trained(name: str, layers: int, width: int, kv_heads: int = 0, vocabulary: int = 4096, family: str = "llama") -> Sizes:
    """A model with heads of 64."""
    heads = width // 64
    return Sizes(name, family, layers, width, heads, kv_heads or heads, vocabulary)


SMALL = trained("llama-192", 4, 192)
MIXTURE = trained("mixtral-384", 4, 384, 2, family="mixtral")
EXPERTS = ("gate_up_proj", "down_proj")

WRITTEN_TRAINING = (
    TrainingCase("tiny-short", trained("tiny", 2, 128, vocabulary=1024), 8, 128),
    TrainingCase("demo-muon", trained("demo", 4, 192, family="qwen3"), 8, 512, optimizer="muon"),
    TrainingCase("llama-384", trained("llama-384", 6, 384), 8, 512),
    TrainingCase("llama-384-t1024", trained("llama-384", 6, 384), 4, 1024),
    TrainingCase("grouped-512", trained("grouped-512", 8, 512, 2), 4, 512),
    TrainingCase("grouped-576-v16k", trained("grouped-576", 8, 576, 3, 16384), 2, 512),
    TrainingCase("llama-1024", trained("llama-1024", 2, 1024), 2, 512),
    TrainingCase("very-short", trained("llama-320", 6, 320), 32, 64),
    TrainingCase("one-long", trained("llama-320", 6, 320), 1, 2048),
    TrainingCase("accumulated", trained("llama-320", 4, 320), 4, 256, grad_accumulation=4),
    TrainingCase("head-heavy", trained("head-heavy", 2, 128, vocabulary=16384), 8, 256),
    TrainingCase("deep-192", trained("deep-192", 12, 192), 8, 256),
    TrainingCase("eager-320", trained("llama-320", 4, 320), 8, 256, compile=False),
    TrainingCase("eager-fp32", trained("llama-320", 4, 320), 4, 256, dtype="fp32", compile=False),
    TrainingCase("eager-muon", SMALL, 8, 256, optimizer="muon", compile=False),
    TrainingCase("lora-small", SMALL, 4, 128, method="lora"),
    TrainingCase("lora-512", trained("llama-512", 6, 512), 4, 256, method="lora"),
    TrainingCase("qlora-512", trained("llama-512", 6, 512), 4, 256, method="qlora"),
    TrainingCase("lora-experts", MIXTURE, 4, 256, method="lora", targets=(ALL_LINEAR, *EXPERTS)),
    TrainingCase("qlora-experts", MIXTURE, 4, 256, method="qlora", targets=(ALL_LINEAR, *EXPERTS)),
    TrainingCase("lora-beside-experts", MIXTURE, 4, 256, method="lora"),
)

TRAINING = (
    *WRITTEN_TRAINING,
    *default_cases(
        WRITTEN_TRAINING, FAMILIES, lambda case: case.sizes.family,
        lambda family: TrainingCase(f"family-{family}", trained(f"{family}-320", 4, 320, family=family), 8, 256),
    ),
    *default_cases(
        WRITTEN_TRAINING, TRAINED, lambda case: case.optimizer,
        lambda optimizer: TrainingCase(f"optimizer-{optimizer}", SMALL, 8, 256, optimizer=optimizer, compile=False),
    ),
    *default_cases(
        WRITTEN_TRAINING, METHODS, lambda case: case.method,
        lambda method: TrainingCase(f"method-{method}", SMALL, 8, 256, method=method, compile=False),
    ),
    *default_cases(
        WRITTEN_TRAINING, TRAINING_TYPES, lambda case: case.dtype,
        lambda dtype: TrainingCase(f"type-{dtype}", SMALL, 8, 256, dtype=dtype, compile=False),
    ),
    *default_cases(
        WRITTEN_TRAINING, RECOMPUTATIONS, lambda case: case.recomputation,
        lambda policy: TrainingCase(f"recompute-{policy}", SMALL, 8, 256, recomputation=policy, compile=False),
    ),
)  # fmt: skip

# -- serving --------------------------------------------------------------------------------------------------------------

DEMO = Sizes("demo-192", "qwen3", 4, 192, 3, 3, 4096)
SMALL_SERVED = Sizes("llama-384", "llama", 6, 384, 6, 6, 4096)
GROUPED = Sizes("grouped-512", "llama", 8, 512, 8, 2, 4096)
LONG = Sizes("long-320", "llama", 4, 320, 5, 5, 4096, max_positions=8448)
MIDDLE = Sizes("grouped-576", "llama", 12, 576, 9, 3, 16384, 1536)
WIDE = Sizes("llama-1024", "llama", 4, 1024, 16, 16, 8192)
SMOL = Sizes("smollm-135m", "llama", 30, 576, 9, 3, 49152, 1536)
IN_BLOCKS = Sizes("blocks-512", "llama", 6, 512, 8, 2, 8192, 1536)
"""Whose rows are whole blocks of 256, as GGUF's K types want them."""

GGUF_PRECISIONS = {"int4-k": "Q4_K_M"}
"""Scheme that no plain weights are rounded to → the GGUF file whose matrices are kept in it."""

WRITTEN_SERVING = (
    ServingCase(DEMO, "bf16", 1, 64),
    ServingCase(DEMO, "int8", 4, 128),
    ServingCase(SMALL_SERVED, "bf16", 1, 256),
    ServingCase(SMALL_SERVED, "bf16", 16, 128),
    ServingCase(SMALL_SERVED, "fp32", 4, 256),
    ServingCase(SMALL_SERVED, "int8", 64, 64),
    ServingCase(SMALL_SERVED, "int4", 1, 128),
    ServingCase(GROUPED, "bf16", 8, 512),
    ServingCase(GROUPED, "int8", 2, 1024),
    ServingCase(GROUPED, "int8_weight_only", 1, 128),
    ServingCase(GROUPED, "int4", 16, 256, head_dtype="int8"),
    ServingCase(MIDDLE, "bf16", 1, 512),
    ServingCase(MIDDLE, "bf16", 4, 64, kv_dtype="int8"),
    ServingCase(MIDDLE, "int8", 16, 256, head_dtype="int8", kv_dtype="int8"),
    ServingCase(WIDE, "bf16", 1, 128),
    ServingCase(WIDE, "int8", 8, 128),
    ServingCase(WIDE, "int4", 1, 128),
    ServingCase(SMOL, "bf16", 1, 128),
    ServingCase(SMOL, "int8", 1, 256),
    ServingCase(SMOL, "int4", 8, 128, head_dtype="int8"),
    ServingCase(LONG, "bf16", 1, 4096),
    ServingCase(LONG, "int8", 2, 8192, kv_dtype="int8"),
    ServingCase(LONG, "bf16", 1, 4096, kv_dtype="int4"),
    ServingCase(MIDDLE, "int8", 16, 256, kv_dtype="int4"),
    ServingCase(IN_BLOCKS, "int4-k", 1, 128),
    ServingCase(IN_BLOCKS, "int4-k", 8, 256),
    ServingCase(SMALL_SERVED, "bf16", 2, 128, runner="torch"),
    ServingCase(SMALL_SERVED, "bf16", 4, 128, adapters=True),
    ServingCase(SMOL, "bf16", 16, 64, loras="8,16,q_proj,v_proj"),
    ServingCase(SMOL, "int8", 16, 64, loras="8,16,all-linear"),
    ServingCase(SMOL, "int4", 16, 64, loras="8,16,q_proj,v_proj"),
    ServingCase(DEMO, "int8", 4, 64, over_http=True),
    ServingCase(SMALL_SERVED, "bf16", 1, 128, over_http=True),
    ServingCase(GROUPED, "int8", 16, 128, over_http=True),
    ServingCase(WIDE, "bf16", 8, 256, over_http=True),
)

SERVING = (
    *WRITTEN_SERVING,
    *default_cases(
        WRITTEN_SERVING, FAMILIES, lambda case: case.sizes.family,
        # Tokens are drawn: the largest logit of random weights is soon the same one, whose experts then stay in the cache.
        lambda family: ServingCase(Sizes(f"{family}-320", family, 4, 320, 5, 5, 4096), "bf16", 2, 128, sampling=(DRAWN,)),
    ),
    *default_cases(
        WRITTEN_SERVING, NATIVE, lambda case: case.scheme,
        lambda scheme: ServingCase(IN_BLOCKS if SCHEMES[scheme].only_read else SMALL_SERVED, scheme, 2, 128),
    ),
    *default_cases(
        WRITTEN_SERVING, WEIGHTS, lambda case: case.head_dtype,
        lambda head: ServingCase(SMALL_SERVED, "bf16", 1, 64, head_dtype=head),
    ),
    *default_cases(
        WRITTEN_SERVING, CACHE_TYPES, lambda case: case.kv_dtype,
        lambda cache: ServingCase(SMALL_SERVED, "bf16", 2, 512, kv_dtype=cache),
    ),
    *(ServingCase(SMALL_SERVED, "bf16", 8, 64, sampling=(kind,)) for kind in SAMPLING_KINDS),
)  # fmt: skip

SAMPLING: dict[str, dict[str, Any]] = {
    DRAWN: {"temperature": 0.8},
    FILTERED: {"temperature": 0.8, "top_p": 0.95},
    PENALTIES: {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    LOGPROBS: {"logprobs": 5},
}
"""Kind → the parameters of a request that asks for it."""
