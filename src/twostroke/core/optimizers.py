"""Optimizers, one row each: what training keeps and moves for them, and the rates that a recipe may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Optimizer = Literal["adamw", "adam", "sgd", "muon", "lamb"]
"""Those that training runs, as recipes name them."""


@dataclass(frozen=True)
class OptimizerRow:
    """``moments``: numbers that are kept for each parameter; ``matrix_moments``: for each of the blocks' matrices. ``rates``:
    learning rate where a recipe gives none, by method; "qlora" is as "lora"."""

    moments: int
    matrix_moments: int
    rates: Mapping[str, float]
    eight_bit: bool = False
    """Each moment takes a byte, and a share of an fp32 scale."""
    by_matrix: bool = False
    """An update depends on a matrix as a whole: q, k and v of a packed projection are updated apart."""
    passes: int = 0
    """Times that an update reads or writes an fp32 number a parameter beyond weights, gradients and moments once each."""


def _rates(pretrain: float, full: float, lora: float) -> Mapping[str, float]:
    return {"pretrain": pretrain, "full": full, "lora": lora}


_ADAM = _rates(4e-3, 2e-5, 2e-4)
"""Pretraining of models of tens of millions of parameters with this package; 2e-5 for all weights (Llama 2, arXiv:2307.09288,
section 3.1); 2e-4 for adapters (QLoRA, arXiv:2305.14314, appendix B.2). Larger models want smaller rates."""

OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(2, 2, _ADAM),
    "adam": OptimizerRow(2, 2, _ADAM),
    # 0.1 is the best of 0.1, 0.5 and 2 over 120 steps of 0.9M parameters; the other two are assumed.
    "sgd": OptimizerRow(1, 1, _rates(0.1, 5e-3, 5e-2)),
    # The rates of what Muon leaves to AdamW.
    "muon": OptimizerRow(2, 1, _ADAM, by_matrix=True),
    # 0.03 is the best of 0.003, 0.01, 0.03 and 0.1 over 120 steps of 0.9M parameters; the other two are assumed.
    "lamb": OptimizerRow(2, 2, _rates(0.03, 2e-4, 2e-3), by_matrix=True, passes=18),
    "adamw8bit": OptimizerRow(2, 2, _ADAM, eight_bit=True),
}

TRAINED: tuple[str, ...] = get_args(Optimizer)
CHOICES = f"{', '.join(list(OPTIMIZERS)[:-1])} or {list(OPTIMIZERS)[-1]}"
"""For help texts of plans, which know those of others as well."""
