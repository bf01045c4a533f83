"""Runs a plan with torch: builds each scheduled step's tensors and lets the interpreter read them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.engine import plan as p
from twostroke.engine.adapters import Parts
from twostroke.engine.batch import BatchBuilder
from twostroke.engine.expert_load import ExpertLoad
from twostroke.engine.interpreter import TorchInterpreter
from twostroke.engine.kv_pool import KVPool
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

if TYPE_CHECKING:
    from jaxtyping import Float


class TorchRunner:
    """Has the interface of ``NativeRunner``. It computes with as many threads as the caller has given torch."""

    def __init__(self, plan: p.Plan, pool: KVPool | TiledKVPool, config: SchedulerConfig) -> None:
        self.plan, self.pool = plan, pool
        self._builder = BatchBuilder(plan.spec, config, plan.dtype)
        self.experts = None if plan.spec.moe is None else ExpertLoad(plan.spec)
        self._interpreter = TorchInterpreter(plan, pool, experts=self.experts)

    @torch.inference_mode()
    def run(
        self, step: ScheduledStep, rows: Tensor | None = None, n_threads: int = 1, n_hidden: int = 0
    ) -> Float[Tensor, "kept V"]:
        """fp32 logits of the rows that a token is sampled from, or of ``rows``. The last ``n_hidden`` of ``rows`` have no
        logits, but ``hidden``."""
        if self.experts is not None:
            self.experts.touched[0] = 0
        batch = self._builder.build(step)
        return self._interpreter.run(batch if rows is None else replace(batch, sampled_rows=rows, n_hidden=n_hidden))

    @property
    def hidden(self) -> Float[Tensor, "n_hidden E"]:
        """In fp32: what the head would have read of the last step's last rows."""
        return self._interpreter.hidden

    @staticmethod
    def hold(parts: Parts) -> Parts:
        """The form in which the interpreter reads an adapter: as it is."""
        return parts

    def release_logits(self) -> None:
        """Does nothing: no logits are kept from step to step."""

    def best_of(self, n: int) -> None:
        """None: torch does not look for the largest logits as it writes them."""
