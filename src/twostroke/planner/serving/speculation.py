"""Speculative decoding: a cheap draft proposes γ tokens, the model checks them in one pass (Leviathan, Kalman, Matias,
arXiv 2211.17192). The paper's own tables are the test: tests/planner/test_speculation.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from twostroke.core.errors import ConfigError
from twostroke.core.named import named

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
