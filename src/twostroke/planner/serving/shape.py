"""How a model is served: the questions that a serving plan answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from twostroke.core.checks import check_whole
from twostroke.core.engine_settings import SETTINGS
from twostroke.core.errors import ConfigError
from twostroke.core.named import named
from twostroke.core.policy import PAGE_TOKENS
from twostroke.core.sampling_kinds import SAMPLING_KINDS
from twostroke.core.schemes import CACHES, WEIGHTS, scheme_of
from twostroke.planner.serving.adapters import ServedAdapters

LLAMA_CPP = "llama.cpp"

ENGINES = ("any", "vllm", "trtllm", "sglang", LLAMA_CPP)
"""Engines that have constants; "any" takes the mean of those of data centres."""


@dataclass(frozen=True)
class Placement:
    """How one model is laid over devices for serving: ``tensor`` · ``pipeline`` hold one copy; with ``expert`` > tensor,
    attention runs in expert/tensor groups that each serve their share of the requests (data-parallel attention). ``expert``
    devices hold different experts; where a stage has more, each expert is cut over as many as there are for it."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def stage_devices(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def attention_groups(self) -> int:
        return self.stage_devices // self.tensor

    @property
    def expert_ranks(self) -> int:
        """Devices that hold different experts; 1: every device has its slice of all."""
        return math.gcd(self.expert, self.stage_devices)

    @property
    def expert_slices(self) -> int:
        """Devices that an expert is cut over."""
        return self.stage_devices // self.expert_ranks

    @property
    def devices(self) -> int:
        return self.stage_devices * self.pipeline


HEAD_DTYPES = ("auto", *WEIGHTS)
CACHE_DTYPES = ("auto", *CACHES)


@dataclass(frozen=True)
class ServingShape:
    """How a model is served. ``tensor`` · ``pipeline`` devices hold one copy; with ``expert`` above ``tensor`` attention is in
    expert/tensor groups. Raises ConfigError."""

    scheme: Annotated[str, "how weights are held"] = "bf16"
    batch: Annotated[int, "requests that decode together"] = 1
    prompt_tokens: Annotated[int, "tokens of a prompt"] = 512
    output_tokens: Annotated[int, "tokens of an answer"] = 128
    kv_dtype: Annotated[str, "type of the cache; auto: bf16, or fp32 with fp32 weights"] = "auto"
    head_dtype: Annotated[str, "how our engine holds the output head; auto: bf16, or fp32 with fp32 weights"] = "auto"
    kv_cache_bytes: Annotated[int, "bytes", "asked for; 0: the engine's default"] = 0
    max_model_len: Annotated[int, "longest context; 0: the model's"] = 0
    token_budget: Annotated[int, "most tokens of a step; 0: the engine's default"] = 0
    max_running: Annotated[int, "most requests of a step; 0: the engine's default"] = 0
    max_step_ratio: Annotated[
        str, "times as long as prompts may make a step of our engine beside others: auto, off or a number"
    ] = "auto"
    tensor: Annotated[int, "ranks of tensor parallelism"] = 1
    pipeline: Annotated[int, "stages"] = 1
    expert: Annotated[int, "devices that share the experts; above `tensor` it spreads them over more"] = 1
    prefix_hit_share: Annotated[float, "share of a prompt that is cached already"] = 0.0
    speculation: Annotated[Speculation | None, "drafting, where it is used"] = None
    engine: Annotated[str, "whose step and launch times are taken: any, vllm, trtllm, sglang or llama.cpp"] = "any"
    answers: Annotated[int, "of the batch that are to one prompt, which is computed once"] = 1
    adapters: Annotated[tuple[ServedAdapters, ...], "adapters that the requests of a batch name in turn"] = ()
    in_int8: Annotated[tuple[str, ...], "matrices of an int4 directory that it holds in int8, each as layer.product"] = ()
    in_bf16: Annotated[tuple[str, ...], "matrices of a quantised directory that are held as plain numbers, so named"] = ()
    sampling: Annotated[tuple[str, ...], "what choosing tokens asks beyond the largest logit, as drawn"] = ()
    in_server: Annotated[bool, "HTTP and its clients want cores beside our engine"] = True

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens", "output_tokens", "tensor", "pipeline", "expert", "answers"):
            check_whole(name, getattr(self, name))
        for name in ("kv_cache_bytes", "max_model_len", "token_budget", "max_running"):
            check_whole(name, getattr(self, name), 0)
        if self.batch % self.answers:
            raise ConfigError(f"batch={self.batch} must be a multiple of answers={self.answers}: each prompt has so many.")
        scheme_of(self.scheme)
        if self.head_dtype not in HEAD_DTYPES:
            raise ConfigError(
                f"head_dtype={self.head_dtype!r} is not a way to hold a head. Use one of {', '.join(HEAD_DTYPES)}."
            )
        if self.kv_dtype not in CACHE_DTYPES:
            raise ConfigError(f"kv_dtype={self.kv_dtype!r} is not a type of KV cache. Use one of {', '.join(CACHE_DTYPES)}.")
        if not SETTINGS["max_step_ratio"].allows(self.max_step_ratio):
            raise ConfigError(f"max_step_ratio={self.max_step_ratio!r} must be auto, off or a number above 1.")
        unknown = [kind for kind in self.sampling if kind not in SAMPLING_KINDS]
        if unknown:
            raise ConfigError(f"sampling={unknown[0]!r} is not a way to choose. Use some of {', '.join(SAMPLING_KINDS)}.")
        if not 0 <= self.prefix_hit_share < 1:
            raise ConfigError(
                f"prefix_hit_share={self.prefix_hit_share} must be at least 0 and below 1: the last token is new."
            )
        if self.engine not in ENGINES:
            raise ConfigError(f"engine={self.engine!r} is not in the measured tables. Use one of {', '.join(ENGINES)}.")

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """(layer.product, scheme) of matrices that are not held in ``scheme``."""
        how = scheme_of(self.scheme)
        beside = tuple((name, how.beside or how.name) for name in self.in_int8)
        return beside + tuple((name, how.kept) for name in self.in_bf16)

    @property
    def placement(self) -> Placement:
        return Placement(self.tensor, self.pipeline, self.expert)

    @property
    def prompts(self) -> int:
        """Prompts of a batch, each computed once for all its answers."""
        return self.batch // self.answers

    @property
    def sampled_rows(self) -> int:
        """Rows of logits of one step on one device: a token of each request of an attention group, and its drafted tokens."""
        tokens = 1 if self.speculation is None else self.speculation.draft_tokens + 1
        return -(-self.batch // self.placement.attention_groups) * tokens

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that are found in the cache: whole pages, never the last token."""
        return min(int(self.prefix_hit_share * self.prompt_tokens) // PAGE_TOKENS * PAGE_TOKENS, self.prompt_tokens - 1)

    @property
    def context(self) -> int:
        """Tokens before an average token of an answer: prompt + output/2."""
        before = self.prompt_tokens + (self.output_tokens + 1) // 2
        return named("context", before, "tokens", "before an average token of an answer", section="work")

    @property
    def cache_dtype(self) -> str:
        return scheme_of(self.scheme).kept if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def head(self) -> str:
        """How our engine holds the output head."""
        return scheme_of(self.scheme).kept if self.head_dtype == "auto" else self.head_dtype

    @property
    def compute_dtype(self) -> str:
        """The type of activations."""
        return scheme_of(self.scheme).kept

    @property
    def compute_bytes(self) -> float:
        return scheme_of(self.scheme).kept_bytes


MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class Speculation:
    """A cheap draft proposes tokens, and the model checks them. Raises ConfigError."""

    draft_tokens: Annotated[int, "γ, tokens drafted a step"]
    acceptance: Annotated[float, "α, mean probability that one is kept, taken as independent from token to token"]
    draft_cost: Annotated[float, "c, time of one draft token ÷ time of one model step"] = 0.0

    def __post_init__(self) -> None:
        gamma = self.draft_tokens
        if isinstance(gamma, bool) or not isinstance(gamma, int) or not 1 <= gamma <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"speculation's draft_tokens={gamma!r} must be a whole number from 1 to {MAX_DRAFT_TOKENS}.")
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"speculation's acceptance={self.acceptance} is a share: use 0 to 1.")
        if not 0 <= self.draft_cost < math.inf:
            raise ConfigError(f"speculation's draft_cost={self.draft_cost} must be at least 0: a draft's time ÷ a step's.")

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """From ``γ,α,c`` or ``γ,α``, as in ``4,0.8,0.05``."""
        parts = text.split(",")
        try:
            gamma, alpha, cost = int(parts[0]), float(parts[1]), float(parts[2]) if len(parts) > 2 else 0.0
        except (ValueError, IndexError):
            parts = []
        if len(parts) not in (2, 3):
            raise ConfigError(
                f"speculation {text!r} is not γ,α,c: tokens drafted, share accepted, a draft's time ÷ a step's. Use 4,0.8,0.05."
            )
        return cls(gamma, alpha, cost)

    @classmethod
    def measured(cls, drafts: float, tokens: float) -> Speculation:
        """What gives ``tokens`` a request and step by ``drafts`` drafted ones: γ is rounded, α solves equation 1. A draft's own
        time is part of the step that was measured."""
        gamma = min(MAX_DRAFT_TOKENS, max(1, round(drafts)))
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(gamma, middle).tokens_per_step < tokens else (low, middle)
        return cls(gamma, low)

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of one check, equation 1: (1 − α^(γ+1)) ÷ (1 − α); γ + 1 for α = 1."""
        alpha, gamma = self.acceptance, self.draft_tokens
        tokens = gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
        return named("tokens_per_step", tokens, "tokens", "Leviathan et al., arXiv 2211.17192, equation 1", section="time")

    @property
    def speed_up(self) -> float:
        """Theorem 3.8: tokens a step ÷ (γ·c + 1), where checking γ + 1 tokens takes as long as one step: one request, memory
        the limit."""
        return self.tokens_per_step / (self.draft_tokens * self.draft_cost + 1)

    def speed_up_of(self, step_s: float, check_s: float) -> float:
        """The same where checking takes ``check_s`` instead of a plain step's ``step_s``: in large batches arithmetic is the
        limit and γ + 1 tokens cost more than one. tokens a step · step ÷ (γ·c·step + check)."""
        return self.tokens_per_step * step_s / (self.draft_tokens * self.draft_cost * step_s + check_s)

    @property
    def operations(self) -> float:
        """Arithmetic against plain decoding, theorem 3.11 with a draft that costs none: (1 − α)(γ + 1) ÷ (1 − α^(γ+1))."""
        return (self.draft_tokens + 1) / self.tokens_per_step
