"""What ``twostroke bench serve`` does with a load: once, at rising rates, and for each of several settings of the engine."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.bench.definitions import Slo
from twostroke.bench.engine_counters import FORMULAS as COUNTED
from twostroke.bench.load import LoadResult, run_load
from twostroke.bench.load_spec import LoadSpec
from twostroke.bench.own_server import own_server
from twostroke.bench.prediction import first_tokens, latency_quantiles, measured_values
from twostroke.bench.sweep import Sweep, SweepPoint, auto_rates
from twostroke.cli.console import log, progress
from twostroke.cli.engine_options import OPTIONS, words
from twostroke.core.described import plain
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, TwostrokeError, did_you_mean
from twostroke.core.spec import ModelSpec
from twostroke.planner.truth.drafts import drafts_seen
from twostroke.planner.truth.recording import recording
from twostroke.quantization.held import serving_shape
from twostroke.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from twostroke.planner.serving.shape import ServingShape
    from twostroke.planner.truth.recording import Planned


@dataclass(frozen=True)
class Target:
    """The server that gets the load: one at ``url``, or one of ``directory`` with ``engine``'s settings."""

    url: str | None
    directory: Path | None
    spec: ModelSpec | None
    engine: EngineSettings
    adapters: Mapping[str, Path]
    key: str | None
    server: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[Target]:
        """The same with its server running, at a known address."""
        if self.url is not None:
            yield self
            return
        assert self.directory is not None
        log(f"starting a server for {self.directory}")
        options = [*words(self.engine), *(f"--lora={name}={path}" for name, path in self.adapters.items())]
        with own_server(self.directory, options) as own:
            # The engine's choice, if --dtype left it to the engine.
            yield replace(self, url=own.url, server=own.document, engine=replace(self.engine, dtype=own.dtype))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        if self.directory is None:
            return None
        from twostroke.data.tokenizer import load_tokenizer

        return load_tokenizer(self.directory)


def measure_once(
    target: Target, load: LoadSpec, slo: Slo | None, stack: contextlib.ExitStack, keep_late: bool
) -> tuple[LoadResult, dict[str, Any]]:
    """Predict, freeze, send, measure, record: the load's result and the command's document of it. A refused run is recorded as
    failed."""
    directory, spec, engine = target.directory, target.spec, target.engine
    inputs: dict[str, Any] = {"url": target.url, "scheme": None}
    plan = None
    if directory is not None and spec is not None:
        sampling = SamplingParams(temperature=load.temperature).kinds
        drafts = drafts_seen(directory, engine.speculate)
        shape = serving_shape(directory, spec, engine.behind_http(), sampling=sampling, speculation=drafts)
        inputs["directory"] = str(directory.resolve())
        inputs |= {"scheme": shape.scheme, "in_int8": shape.in_int8, "in_bf16": shape.in_bf16}
        plan = functools.partial(_planned_load, spec, load, shape, target.adapters)
    subject = f"{directory.resolve().name if directory else target.url} over HTTP"
    run = stack.enter_context(recording("bench", subject, {**inputs, **engine.changed(), **plain(load)}, plan, log))
    assert target.url is not None
    n = len(load.workload.arrivals)
    with progress("load", n) as advance, run.meter:
        result = run_load(
            target.url, load, slo, target.key, target.tokenizer, progress=lambda ended, _: advance(ended, f"{ended} ended")
        )
    measured = measured_values(result.summary, result.records)
    why = dict.fromkeys(COUNTED, "the server has no /metrics of an engine of ours.") if not result.summary.engine else {}
    quantiles = latency_quantiles(result.records)
    measured = run.spent(measured) | measured
    if result.refusal is not None and not keep_late:
        run.measure({}, "failed", notes=result.refusal)
    else:
        kept = {**measured, "latency_quantiles": quantiles}
        run.measure(kept, "finished" if not result.summary.failures else "partial", why, result.refusal)
    document = plain(result) | {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured}
    document |= {"latency_quantiles": quantiles, "first_tokens": first_tokens(result.records), "server": dict(target.server)}
    return result, document


def measure_sweep(
    target: Target, load: LoadSpec, rates: Sequence[float], slo: Slo | None, keep_late: bool
) -> tuple[Sweep, dict[str, Any]]:
    """The load at each of ``rates``, or around what the server completes of all requests at once; it ends where the server is
    saturated. Its document has each run's."""
    documents: list[dict[str, Any]] = []

    def at(rate: float) -> LoadResult:
        with contextlib.ExitStack() as stack:
            result, document = measure_once(target, load.at_rate(rate), slo, stack, keep_late)
        documents.append(document)
        return result

    if not rates:
        log("all requests at once, to know the throughput")
        most = at(float("inf")).summary.requests_per_s
        if not most > 0:
            raise TwostrokeError("no request was completed of those sent at once, so there is no throughput to sweep towards.")
        rates = auto_rates(most)
        documents.clear()
    points: list[SweepPoint] = []
    for rate in rates:
        log(f"{rate:.3g} requests/s")
        result = at(rate)
        points.append(SweepPoint.of(rate, result.summary, None if keep_late else result.refusal))
        if points[-1].saturated:
            break
    sweep = Sweep(tuple(points))
    return sweep, {"sweep": plain(sweep), "runs": documents}


def variants_of(each: Sequence[str], engine: EngineSettings) -> list[EngineSettings]:
    """``engine`` with every combination of what ``--each OPTION=V1,V2`` names; ``OPTION=all`` is all that the option can be.
    Raises ConfigError."""
    by_option = {
        str(setting.option).removeprefix("--"): (name, setting) for name, setting in OPTIONS.items() if setting.choices
    }
    axes: list[list[tuple[str, Any]]] = []
    for text in each:
        option, equals, values = text.partition("=")
        found = by_option.get(option.removeprefix("--"))
        if found is None or not equals or not values:
            hint = did_you_mean(option.removeprefix("--"), tuple(by_option))
            raise ConfigError(f"--each {text!r:.100} must be OPTION=V1,V2 or OPTION=all. {hint}")
        name, setting = found
        axes.append([(name, value) for value in (setting.choices if values == "all" else values.split(","))])
    return [replace(engine, **dict(choice)) for choice in itertools.product(*axes)]


def variant_name(engine: EngineSettings, each: Sequence[str]) -> str:
    """What of ``engine`` the axes of ``each`` set, as options."""
    names = [text.partition("=")[0].removeprefix("--") for text in each]
    return " ".join(f"{name}={getattr(engine, name.replace('-', '_'))}" for name in names)


def _planned_load(spec: ModelSpec, load: LoadSpec, shape: ServingShape, adapters: Mapping[str, Path]) -> Planned:
    from twostroke.bench.prediction import predict_load
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.adapters import adapters_in
    from twostroke.planner.truth.recording import Planned

    machine = load_hardware("this", "serve")
    shape = replace(shape, adapters=adapters_in(adapters.values()))
    return Planned(predict_load(spec, load, shape, machine), machine)
