"""Serving on devices whose rates are known and no engine's steps: vendors' numbers times the shares that engines reach, or a
calibrated machine's own rates with nothing lost between operations."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.dtypes import bytes_of
from twostroke.core.named import named, within
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import DATASHEET_NOTE, Hardware
from twostroke.planner.money.power import Busy
from twostroke.planner.serving.memory import weights_on_device
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_time import (
    Part,
    Pass,
    efficiencies_of,
    efficiencies_table,
    front_end_s,
    is_fitted,
    one_pass,
)
from twostroke.planner.serving.strategy import Chunk, Step, Strategy
from twostroke.planner.work.component import Work, merge

CHUNK_TOKENS = 8192
"""Prompt tokens that engines on accelerators compute in one step at most."""


class Datasheet(Strategy):
    """Every pass by ``step_time``."""

    token_budget = CHUNK_TOKENS
    most_pages: int | None = None

    def __init__(self, spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> None:
        super().__init__(spec, shape, hardware)
        self.rates = efficiencies_of(hardware, shape.engine)
        if hardware.basis == "measured":
            self.note = (
                "this engine was not measured in such a shape: the machine's rates, with nothing lost between operations."
            )
        else:
            experts = spec.moe is not None
            self.note = _rate_note(hardware, shape.engine, experts)
            self.front_end_s = front_end_s(shape.engine, experts) if is_fitted(hardware) else 0.0

    def weights_bytes(self) -> float:
        return weights_on_device(self.spec, self.shape)

    def decode_pass(self, batch: int | None = None, prompt: bool = False, checked: int = 1) -> Pass:
        """A step of the batch at an answer's mean context, with one prompt beside it where asked for; each request with
        ``checked`` tokens."""
        shape = self.shape
        return one_pass(
            self.spec, shape.scheme, bytes_of(shape.cache_dtype), shape.placement, self.hardware,
            decoding=batch or shape.batch, context=shape.context, checked=checked,
            prompt_tokens=shape.prompt_tokens if prompt else 0.0, hit_tokens=shape.hit_tokens if prompt else 0.0,
        )  # fmt: skip

    def prompt_pass(self) -> Pass:
        """One prompt alone, in steps of ``token_budget``."""
        shape = self.shape
        return one_pass(
            self.spec, shape.scheme, bytes_of(shape.cache_dtype), shape.placement, self.hardware,
            prompt_tokens=shape.prompt_tokens, hit_tokens=shape.hit_tokens,
            steps=-(-(shape.prompt_tokens - shape.hit_tokens) // self.token_budget),
        )  # fmt: skip

    def prefill(self) -> tuple[Work, ...]:
        return self._works(self.prompt_pass())

    def decode(self, batch: int | None = None) -> tuple[Work, ...]:
        return self._works(self.decode_pass(batch))

    def prefill_s(self) -> float:
        return self.prompt_pass().seconds(self.rates)

    def decode_s(self) -> float:
        return self.decode_pass().seconds(self.rates)

    def step(self, batch: int) -> Step:
        once = self.decode_pass(batch)
        busy = once.busy(self.rates)
        return Step(busy.seconds, busy.exchanging_s, self._bound(once), busy)

    def prompt_busy(self) -> Busy:
        return self.prompt_pass().busy(self.rates)

    def step_seconds(self, decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        """``one_pass`` knows prompts of one kind: it is asked for equally many, with the same tokens in all and as many pairs
        of a new token with one before it."""
        shape, new = self.shape, sum(chunk.new for chunk in chunks)
        mean = new / len(chunks) if chunks else 0.0
        keys = sum(chunk.new * (2 * chunk.before + chunk.new) for chunk in chunks) / new if new else 0.0
        return one_pass(
            self.spec, shape.scheme, bytes_of(shape.cache_dtype), shape.placement, self.hardware,
            decoding=decoding, context=context, prompts=len(chunks),
            prompt_tokens=(keys + mean) / 2, hit_tokens=(keys - mean) / 2,
        ).seconds(self.rates)  # fmt: skip

    def added_s(self, prefill_s: float, step_s: float, batch: int | None = None) -> float:
        with within("mixed"):
            mixed = self.decode_pass(batch, prompt=True).seconds(self.rates)
            mixed = named("step_s", mixed, "s", "a step with a prompt")
        return named("prompt_beside_s", max(0.0, mixed - step_s), "s", "what a prompt adds to a step")

    def check_s(self) -> float | None:
        if self.shape.speculation is None:
            return None
        return self.decode_pass(checked=self.shape.speculation.draft_tokens + 1).seconds(self.rates)

    def network_s(self) -> tuple[float, float]:
        return self.prompt_pass().network_s(self.rates), self.decode_pass().network_s(self.rates)

    def _works(self, once: Pass) -> tuple[Work, ...]:
        """A pass by component. Collectives are shared by attention and MLP, each of which ends in one; scheduling and sampling
        stand with the head. What is moved beside products stands with the norms."""
        rates = self.rates
        network = once.network_s(rates) / 2
        norms, attention, mlp = (count * rates.operator_s for count in once.operators)
        launches = {"attention": attention + network, "mlp": mlp + network, "head": once.host_s(rates)}
        moved = once.moved_s(rates)
        works = [Work("norms", 0.0, 0.0, 0.0, moved, norms, moved + norms)]
        works += [self._work_of(part, once, launches.pop(part.component, 0.0)) for part in once.products]
        for part, seconds in ((once.cache, once.cache_s(rates)), (once.prompts, once.prompts_s(rates))):
            if seconds:
                arithmetic, memory = part.arithmetic_s / rates.attention_share, part.memory_s / rates.cache_bandwidth_share
                works.append(Work("attention", part.flops, part.n_bytes, arithmetic, memory, 0.0, seconds))
        return merge(works)

    def _work_of(self, part: Part, once: Pass, launch_s: float) -> Work:
        arithmetic, memory = once.limits(part, self.rates)
        seconds = once.product_s(part, self.rates) + launch_s
        return Work(part.component, part.flops, part.n_bytes, arithmetic, memory, launch_s, seconds)

    def _bound(self, once: Pass) -> str:
        """Which limit most of a step would take alone: memory, arithmetic, or starting operations."""
        rates = self.rates
        arithmetic, memory = map(sum, zip(*(once.limits(part, rates) for part in once.products), strict=True))
        limits = {
            "memory": memory + once.cache.memory_s / rates.cache_bandwidth_share + once.moved_s(rates),
            "arithmetic": arithmetic + once.cache.arithmetic_s / rates.attention_share,
            "launch": once.starts_s(rates) + once.host_s(rates),
        }
        return max(limits, key=lambda name: limits[name])


def _rate_note(hardware: Hardware, engine: str, experts: bool) -> str:
    """How far a datasheet plan is to be trusted: the error on models that the fit had not seen, where that was measured."""
    table = efficiencies_table()
    if hardware.name not in table["measured_on"]:
        return DATASHEET_NOTE
    error = table["unseen_model_error"][engine]["experts" if experts else "dense"]
    what, which = ("models with experts" if experts else "dense models"), ("" if engine == "any" else f" under {engine}")
    return (
        "rates are the datasheet's times shares fitted to public measurements; on "
        f"{what}{which} that the fit had not seen, the median error of TPOT was {error:.0%}."
    )
