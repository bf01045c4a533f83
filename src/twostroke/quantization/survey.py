"""Every scheme that a model can be quantised to, side by side: bytes, what it costs in quality, and what speed is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from twostroke.core.errors import DataError, TwostrokeError
from twostroke.core.families import layout
from twostroke.core.schemes import MIXED, SCHEMES, WRITTEN, Scheme
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.weights import mixed_weights_bytes
from twostroke.quantization.directory import Quantisation, bits_per_weight
from twostroke.quantization.fitting import Fitted, Progress, Text, Way, fit_ways, within
from twostroke.quantization.roundings import DEFAULT_ROUNDING, NEAREST, ROUNDINGS

if TYPE_CHECKING:
    from jaxtyping import Int

    from twostroke.model.decoder import Decoder

PLAIN = "bf16"
"""The scheme that all others are beside."""

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128


@dataclass(frozen=True)
class SurveyRow:
    """One way to hold the model. ``scheme`` is what ``quantize --scheme`` or the engine's ``--dtype`` calls it, ``written`` the
    first of these alone ("": nothing is written). ``bits_per_weight`` is of the blocks' matrices, scales included. ``kl_nats``
    and ``perplexity_ratio`` are beside the model as it is, None of that itself. Rates are predicted for one request, None where
    the machine has none. ``beaten_by``: another row that is no worse in size, KL and rates, and better in one of them."""

    scheme: str
    written: str
    rounding: str
    n_int8_matrices: int
    bytes: float
    bits_per_weight: float
    kl_nats: float | None
    perplexity_ratio: float | None
    decode_tok_per_s: float | None
    prefill_tok_per_s: float | None
    beaten_by: str = ""

    @property
    def held(self) -> str:
        """The scheme, and how many matrices are in the one beside it."""
        return (
            f"{self.scheme} + {self.n_int8_matrices} in {SCHEMES[self.scheme].beside}" if self.n_int8_matrices else self.scheme
        )

    @property
    def label(self) -> str:
        return f"{self.held} {self.rounding}" if self.rounding else self.held


@dataclass(frozen=True)
class Survey:
    """``rows`` by size, the smallest first. Quality is of ``judged_tokens`` tokens that nothing was fitted to."""

    rows: tuple[SurveyRow, ...]
    fitted_to_tokens: int
    judged_tokens: int
    max_kl_nats: float
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> SurveyRow | None:
        """The smallest whose KL is within ``max_kl_nats``, the fastest of equally small ones."""
        fitting = [row for row in self.rows if row.kl_nats is not None and row.kl_nats <= self.max_kl_nats]
        return min(fitting, key=lambda row: (row.bytes, -(row.decode_tok_per_s or 0.0)), default=None)


def ways() -> list[Way]:
    """Every scheme that is written, or that the engine makes of such a directory, by every rounding that makes a difference."""
    found = [Way(row, NEAREST) for row in SCHEMES.values() if row.computed_from is not None]
    for scheme in dict.fromkeys(SCHEMES[name].here for name in WRITTEN):
        found += [Way(scheme, rounding) for rounding in (ROUNDINGS.values() if scheme.group else (NEAREST,))]
    return found


def survey(
    decoder: Decoder,
    batches: Sequence[Int[Tensor, "B T"]],
    max_kl_nats: float,
    machine: Hardware | None,
    progress: Progress | None = None,
) -> Survey:
    """All rows, of one walk through ``decoder``, and of further ones for groups of the default size if their KL is above
    ``max_kl_nats``. ``machine`` is what speed is predicted for. Nothing is written. Raises DataError where the text is a single
    row."""
    text = Text.of(batches)
    if not len(text.judged):
        raise DataError("the text is a single row, so none is left to judge by. Give more of it with --calibration.")
    tell, spec, every = progress or (lambda done, note: None), decoder.spec, ways()
    mixed = Way(SCHEMES[MIXED[0]].here, ROUNDINGS[DEFAULT_ROUNDING])
    found = list(zip(every, fit_ways(decoder, text, every, tell, keep=(mixed,)), strict=True))
    first = next(fitted for way, fitted in found if way == mixed)
    held = within(decoder, text, mixed, first, max_kl_nats, tell)
    if held.int8:
        found.append((Way(mixed.scheme, mixed.rounding, held.int8), held))
    notes: list[str] = []
    rows = [_row(spec, SCHEMES[PLAIN], None, None, machine, notes)]
    rows += [_row(spec, way.scheme, way, fitted, machine, notes) for way, fitted in found]
    rows.sort(key=lambda row: (row.bytes, row.kl_nats or 0.0))
    rows = [replace(row, beaten_by=_beaten_by(row, rows)) for row in rows]
    n_judged = text.judged.numel()
    return Survey(tuple(rows), text.fitted_to.numel(), n_judged, max_kl_nats, tuple(dict.fromkeys(notes)))


def _row(
    spec: ModelSpec, scheme: Scheme, way: Way | None, fitted: Fitted | None, machine: Hardware | None, notes: list[str]
) -> SurveyRow:
    beside = frozenset() if way is None else way.beside
    entries = [entry for entry in layout(spec) if entry.matrix is not None and entry.canonical in beside]
    others = tuple(f"{e.canonical.split('.')[1]}.{e.matrix.name}" for e in entries if e.matrix is not None)
    decode = prefill = None
    if machine is not None:
        prompt = min(PROMPT_TOKENS, spec.max_positions // 2)
        output = min(OUTPUT_TOKENS, spec.max_positions - prompt)
        shape = ServingShape(scheme.name, prompt_tokens=prompt, output_tokens=output, in_int8=others, in_server=False)
        try:
            plan = plan_serving(spec, shape, machine)
            decode, prefill = plan.decode_tok_per_s, plan.prefill_tok_per_s
        except TwostrokeError as error:
            notes.append(f"no speed of {scheme.name}: {error}")
    judged = None if fitted is None else fitted.judgement
    name = scheme.name if scheme.group else scheme.family
    return SurveyRow(
        name,
        "" if way is None else scheme.computed_from or name,
        way.rounding.name if way is not None and scheme.group else "",
        len(entries),
        mixed_weights_bytes(spec, scheme.name, tuple((name, scheme.beside or "") for name in others)),
        bits_per_weight(spec, Quantisation(scheme).with_others(entries)),
        None if judged is None else judged.kl_nats,
        None if judged is None else judged.perplexity_ratio,
        decode,
        prefill,
    )


def _merits(row: SurveyRow) -> tuple[float, ...]:
    """What a person wants little of."""
    return (row.bytes, row.kl_nats or 0.0, -(row.decode_tok_per_s or 0.0), -(row.prefill_tok_per_s or 0.0))


def _beaten_by(row: SurveyRow, rows: Sequence[SurveyRow]) -> str:
    """The row with the least KL of those that are at least as good as ``row`` in everything and better in something. Without
    rates only rows of one scheme are compared, which are equally fast."""
    own = _merits(row)
    comparable = [other for other in rows if row.decode_tok_per_s is not None or other.held == row.held]
    better = [
        other
        for other in comparable
        if _merits(other) != own and all(theirs <= ours for theirs, ours in zip(_merits(other), own, strict=True))
    ]
    return min(better, key=lambda other: other.kl_nats or 0.0).label if better and row.kl_nats is not None else ""
