"""How a server of our engine is best set for a latency: weights, cache, token budget and running requests, by simulation.

An SLO bounds mean TTFT and TPOT. Of all settings those are taken that carry the most requests a second within it. Of settings
that carry nearly as much the ones with fewer running requests are better: what more requests would wait for is then the queue,
and those that run keep their TPOT in an overload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from twostroke.core.checks import check_limit
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.policy import MAX_RUNNING, PAGE_TOKENS, TOKEN_BUDGET
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_seconds
from twostroke.planner.choosing.quality import Quality, quality_seen
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.http import http_front_end
from twostroke.planner.serving.plan import ServingPlan, plan_serving, served_schemes
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import (
    MOST_UTILISED,
    SEARCH_REQUESTS,
    AtRate,
    Server,
    Slo,
    at_rate,
    largest_rate,
    step_of_batch,
)

MODES = ("latency", "throughput")
"""Presets of an SLO: near what one request alone finds, or none."""

LATENCY_TTFT, LATENCY_TPOT = 2.0, 1.5
"""Times of what one request alone finds in the fastest type, within which ``latency`` keeps. A prompt then waits for one more
at most on average. Assumed."""

BUDGETS = (128, 256, 512, 1024, 2048)
RUNNING = (1, 2, 4, 8, 16, 32, 64, MAX_RUNNING)

AS_GOOD = 0.98
"""A setting that carries this share of the most is as good: so near, 150 requests do not tell rates apart."""

WAITS = 1.25
"""Times what the first token takes otherwise, beyond which requests would wait too long for one of fewer places. Assumed."""

BETTER = 1.05
"""Times the usual token budget's requests a second that another must carry before it is taken."""

LEVELS = (1, 2, 4, 8, 16, 32, 64)
"""Users who ask again when answered, of whom a server's expectation is kept: what was served is scored by how many requests
were in flight."""

LEVEL_ROUNDS = 3
"""Answers of each that are simulated for that."""


class Fixed(NamedTuple):
    """What was set by hand: it is not chosen. Weights and cache have types in the shapes."""

    token_budget: int | None = None
    max_running: int | None = None
    kv_cache_bytes: int | None = None


@dataclass(frozen=True)
class Setting:
    """What a server is set to."""

    scheme: Annotated[str, "how weights are held"]
    kv_dtype: Annotated[str, "type of the cache"]
    token_budget: Annotated[int, "tokens", "of a step at most"]
    max_running: Annotated[int, "requests of a step at most"]
    kv_cache_bytes: Annotated[int | None, "bytes", "of the cache; null: the engine's own share of the free memory holds enough"]


@dataclass(frozen=True)
class Considered:
    """The best that one way to hold weights and cache comes to. ``requests_per_s`` is 0 where the SLO is not met even alone."""

    scheme: Annotated[str, "how weights are held"]
    kv_dtype: Annotated[str, "type of the cache"]
    alone_ttft_s: Annotated[float, "s", "to the first token of one request alone"]
    alone_tpot_s: Annotated[float, "s", "between tokens of one request alone"]
    requests_per_s: Annotated[float, "requests a second within the SLO"]


class Level(NamedTuple):
    """So many users who each ask again when answered."""

    users: Annotated[int, "users"]
    ttft_s: Annotated[float, "s", "to the first token, on average"]
    tpot_s: Annotated[float, "s", "between tokens, on average"]
    requests_per_s: Annotated[float, "requests a second"]


@dataclass(frozen=True)
class ServerChoice:
    """What was chosen for an SLO and why; ``chosen`` is None where nothing meets it, and ``refusal`` says what would."""

    prompt_tokens: Annotated[int, "tokens", "of a prompt"]
    output_tokens: Annotated[int, "tokens", "of an answer"]
    mode: Annotated[str, "latency or throughput where that preset was asked for, else empty"]
    slo: Annotated[Slo, "the objective, that of the mode included"]
    chosen: Annotated[Setting | None, "the settings; null: nothing meets the objective"]
    expected: Annotated[AtRate | None, "the most that it carries within the objective"]
    levels: Annotated[tuple[Level, ...], "what users find who ask again at once"]
    considered: Annotated[tuple[Considered, ...], "every way to hold weights and cache that was tried"]
    left_out: Annotated[tuple[str, ...], "types that were not tried, and why"]
    refusal: Annotated[str, "why nothing was chosen, and the best there is"]


def ways_to_serve(
    shape: ServingShape, hardware: Hardware, quality: Quality | None, own_weights: bool = True, own_cache: bool = True
) -> tuple[list[ServingShape], list[str]]:
    """``shape``, and the same with weights and cache in types that were measured to keep the model's quality; and a sentence of
    each kind of type that was not measured. ``own_weights``, ``own_cache``: the type was left to us. Weights that the
    checkpoint holds in codes stay so."""
    schemes, caches, notes = [shape.scheme], [shape.kv_dtype], list[str]()
    plain = not scheme_of(shape.scheme).quantised
    if quality is not None and own_weights and plain:
        known = [name for name in quality.passing("weights") if name in served_schemes(hardware) and name not in schemes]
        schemes += known
        missed = [name for name in quality.weights if name not in (*known, shape.scheme)]
        if not quality.weights:
            notes.append(
                "weights of fewer bits: nothing says what they cost this model. `twostroke quantize MODEL --survey` does."
            )
        elif missed:
            notes.append(f"weights in {', '.join(missed)}: measured above the KL that is kept to, or not served here.")
    if quality is not None and own_cache:
        caches += [name for name in quality.passing("cache") if name not in (shape.cache_dtype, "fp32")]
        if not quality.cache:
            notes.append(
                "a cache of fewer bits: nothing says what it costs this model. `twostroke compare MODEL MODEL --kv-dtype TYPE` "
                "does."
            )
    return [replace(shape, scheme=scheme, kv_dtype=cache) for scheme in schemes for cache in caches], notes


def choose_settings(
    spec: ModelSpec,
    shapes: Sequence[ServingShape],
    hardware: Hardware,
    slo: Slo,
    mode: str = "",
    spread: float = 0.0,
    fixed: Fixed = Fixed(),
    left_out: Sequence[str] = (),
) -> ServerChoice:
    """The settings of the one of ``shapes`` that carries most within ``slo``. Raises ConfigError for an unknown mode or a
    machine that was not calibrated, and CapacityError where no shape fits the memory."""
    if mode and mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not known. Use one of {', '.join(MODES)}.")
    for name, value in vars(slo).items():
        check_limit(name, value)
    if fixed.token_budget and fixed.max_running and fixed.token_budget < fixed.max_running:
        raise ConfigError(
            f"token_budget={fixed.token_budget} must be at least max_running={fixed.max_running}, because every request that "
            "decodes has a token in every step. Raise the one or lower the other."
        )
    if not hardware.is_calibrated_cpu:
        raise ConfigError(
            f"a server's settings are chosen for our engine on a calibrated machine, and {hardware.label} is not one. "
            "Run `twostroke calibrate` there, or set --max-running and --token-budget by hand."
        )
    tried, why_not = list[_Way](), ""
    for shape in shapes:
        try:
            tried.append(_Way(spec, shape, hardware, spread, fixed))
        except CapacityError as error:
            why_not = str(error)
    if not tried:
        raise CapacityError(why_not)
    if mode == "latency":
        fastest = min(tried, key=lambda way: way.alone_e2e_s)
        slo = Slo(slo.ttft_s or LATENCY_TTFT * fastest.alone_ttft_s, slo.tpot_s or LATENCY_TPOT * fastest.alone_tpot_s)
    of_load = shapes[0].prompt_tokens, shapes[0].output_tokens
    found = [(way, *way.first(slo)) for way in tried]
    rows = tuple(way.considered(expected) for way, _, expected in found)
    most = max(row.requests_per_s for row in rows)
    # The first is the checkpoint's own type: of two that are as good it is the more exact.
    way, budget, expected = found[next(i for i, row in enumerate(rows) if row.requests_per_s >= AS_GOOD * most)]
    if expected is None:
        return ServerChoice(*of_load, mode, slo, None, None, (), rows, tuple(left_out), _refusal(slo, rows))
    setting, expected = way.tuned(slo, budget, expected)
    expected = way.kept(setting, expected, slo)
    return ServerChoice(*of_load, mode, slo, setting, expected, way.levels(setting), rows, tuple(left_out), "")


def _refusal(slo: Slo, rows: Sequence[Considered]) -> str:
    """What cannot be met, the best of each kind, and what to do."""
    asked = [f"a {n} of {format_seconds(s)}" for n, s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if s is not None]
    first, later = min(rows, key=lambda row: row.alone_ttft_s), min(rows, key=lambda row: row.alone_tpot_s)
    return (
        f"nothing keeps to {' and '.join(asked)}: one request alone has its first token after "
        f"{format_seconds(first.alone_ttft_s)} at best ({first.scheme} weights) and the next ones every "
        f"{format_seconds(later.alone_tpot_s)} ({later.scheme}), by this machine's profile. Allow more, send shorter prompts, "
        "or take a smaller model."
    )


def choose_server(
    directory: Path | None,
    spec: ModelSpec,
    shape: ServingShape,
    hardware: Hardware,
    slo: Slo,
    mode: str = "",
    spread: float = 0.0,
    fixed: Fixed = Fixed(),
    own_weights: bool = True,
    own_cache: bool = True,
) -> ServerChoice:
    """``choose_settings`` of all ``ways_to_serve`` the model in ``directory``; None: of ``shape`` alone."""
    quality = None if directory is None or not (own_weights or own_cache) else quality_seen(directory)
    shapes, left_out = ways_to_serve(shape, hardware, quality, own_weights, own_cache)
    return choose_settings(spec, shapes, hardware, slo, mode, spread, fixed, left_out)


class _Way:
    """One way to hold weights and cache, and what its settings come to. Raises CapacityError where it does not fit."""

    def __init__(self, spec: ModelSpec, shape: ServingShape, hardware: Hardware, spread: float, fixed: Fixed) -> None:
        self.spec, self.hardware, self.spread, self.fixed = spec, hardware, spread, fixed
        self.shape = replace(shape, batch=1, kv_cache_bytes=fixed.kv_cache_bytes or 0)
        self.http = http_front_end(hardware) is not None
        # A step has a token for each request that decodes, so a budget bounds them.
        self.running = fixed.max_running or min(MAX_RUNNING, fixed.token_budget or MAX_RUNNING)
        self.budgets = [fixed.token_budget] if fixed.token_budget else [b for b in BUDGETS if b >= self.running]
        self.budgets = self.budgets or [self.running]
        widest = self.plan(max(self.budgets), self.running)
        # Neither the budget nor the requests that may run change what a step takes: worked out once for all settings.
        self.step, self.steps = step_of_batch(widest), Server(widest).steps
        alone = self.server(fixed.token_budget or TOKEN_BUDGET, fixed.max_running or 1)
        one = alone.serve(alone.closed_loop(rounds=2))
        self.alone_ttft_s = one.ttft_s.mean
        self.alone_tpot_s = one.tpot_s.mean if one.tpot_s.n else 0.0
        self.alone_e2e_s = one.e2e_s.mean

    def plan(self, budget: int, running: int) -> ServingPlan:
        """With a cache for so many requests, where the engine's own choice holds fewer."""
        shape = replace(self.shape, token_budget=budget, max_running=running)
        found = plan_serving(self.spec, shape, self.hardware)
        if shape.kv_cache_bytes or found.largest_batch == 0:
            return found
        page = found.kv_cache_bytes / found.pages
        wanted = int(page * running * self._pages_of_one())
        if wanted <= found.kv_cache_bytes:
            return found
        try:
            return plan_serving(self.spec, replace(shape, kv_cache_bytes=wanted), self.hardware)
        except CapacityError:
            return found

    def _pages_of_one(self) -> int:
        """Of the longest request that is expected."""
        tokens = (1 + self.spread) * (self.shape.prompt_tokens + self.shape.output_tokens)
        longest = self.shape.max_model_len or self.spec.max_positions
        return -(-min(int(tokens) + 1, longest) // PAGE_TOKENS) + 1

    def server(self, budget: int, running: int) -> Server:
        made = Server(self.plan(budget, running), self.http)
        made.steps = self.steps
        return made

    def rate(self, budget: int, running: int, slo: Slo) -> AtRate | None:
        """The most that these settings carry within the SLO."""
        server = self.server(budget, running)
        found = largest_rate(server.plan, slo, self.step, server, self.spread)
        if found is None or not slo.is_free:
            return found
        return at_rate(server.plan, MOST_UTILISED * found.rate_per_s, self.step, server, self.spread) or found

    def first(self, slo: Slo) -> tuple[int, AtRate | None]:
        """The engine's usual token budget, or the first that keeps to the SLO at all, and the most that it carries."""
        usual = sorted(self.budgets, key=lambda budget: (budget != TOKEN_BUDGET, -budget))
        for budget in usual:
            found = self.rate(budget, self.running, slo)
            if found is not None:
                return budget, found
        return usual[0], None

    def tuned(self, slo: Slo, budget: int, expected: AtRate) -> tuple[Setting, AtRate]:
        """A better token budget, if there is one, and the fewest running requests that carry as much."""
        running = self.running
        for other in [each for each in self.budgets if each != budget]:
            if self.holds(other, running, slo, BETTER * expected.rate_per_s) is None:
                continue
            found = self.rate(other, running, slo)
            if found is not None and found.rate_per_s > expected.rate_per_s:
                budget, expected = other, found
        # Without an SLO nothing is gained by letting requests wait.
        fewer = [] if self.fixed.max_running or slo.is_free else [n for n in RUNNING if n < running]
        latest_s = WAITS * expected.ttft_s
        rate, low, high = AS_GOOD * expected.rate_per_s, 0, len(fewer)  # what some carry, more carry too
        while low < high:
            middle = (low + high) // 2
            found = self.holds(budget, fewer[middle], slo, rate)
            if found is None or found.ttft_s > latest_s:
                low = middle + 1
            else:
                high, running, expected = middle, fewer[middle], found
        plan = self.plan(budget, running)
        return Setting(plan.shape.scheme, plan.shape.cache_dtype, budget, running, plan.shape.kv_cache_bytes or None), expected

    def holds(self, budget: int, running: int, slo: Slo, rate_per_s: float) -> AtRate | None:
        """What is found at ``rate_per_s``; None where it is not carried, or not within the SLO."""
        server = self.server(budget, running)
        found = at_rate(server.plan, rate_per_s, self.step, server, self.spread, SEARCH_REQUESTS)
        return found if found is not None and slo.met(found.ttft_s, found.tpot_s) else None

    def kept(self, setting: Setting, expected: AtRate, slo: Slo) -> AtRate:
        """``expected`` of a longer simulation: at a rate a little lower, if that shows that it is not kept."""
        server = self.server(setting.token_budget, setting.max_running)
        rate = expected.rate_per_s
        for _ in range(5):
            found = at_rate(server.plan, rate, self.step, server, self.spread)
            if found is not None and slo.met(found.ttft_s, found.tpot_s):
                return found
            rate *= 0.9
        return expected

    def levels(self, setting: Setting) -> tuple[Level, ...]:
        server, found = self.server(setting.token_budget, setting.max_running), []
        for users in LEVELS:
            if users > setting.max_running or users > server.plan.largest_batch:
                break
            several = Server(replace(server.plan, shape=replace(server.plan.shape, batch=users)), self.http)
            several.steps = self.steps
            seen = several.serve(several.closed_loop(self.spread, LEVEL_ROUNDS))
            tpot_s = seen.tpot_s.mean if seen.tpot_s.n else 0.0
            found.append(Level(users, seen.ttft_s.mean, tpot_s, seen.requests_per_s))
        return tuple(found)

    def considered(self, expected: AtRate | None) -> Considered:
        rate = 0.0 if expected is None else expected.rate_per_s
        return Considered(self.shape.scheme, self.shape.cache_dtype, self.alone_ttft_s, self.alone_tpot_s, rate)
