"""The planner's simulation has the latencies that ``bench`` would measure of an engine with the same steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest

from twostroke.bench.definitions import LoadSummary, RequestRecord, summarise
from twostroke.planner.serving.drawn import Uniform
from twostroke.planner.serving.policies import POLICIES
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.workload import Workload
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import SchedulerConfig

PAGES = 90
"""So few that requests are preempted."""


def seconds(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
    return 1e-3 + 3e-5 * decoding + 1e-8 * decoding * context + sum(2e-5 * c.new + 1e-9 * c.new * c.before for c in chunks)


def measured(workload: Workload) -> LoadSummary:
    """An engine on a clock of its own: the scheduler step by step, and the time of every token of every request."""
    scheduler = Scheduler(SchedulerConfig(512, 128, 16, PAGES, 2000))
    rest = list(enumerate(workload.arrivals))
    coming: list[tuple[float, int]] = []
    sent: dict[str, float] = {}
    tokens: dict[str, list[float]] = {}
    records, now = [], 0.0
    for _ in range(workload.places if workload.users else len(rest)):
        index, arrival = rest.pop(0)
        heapq.heappush(coming, (arrival.at_s, index))
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at_s, index = heapq.heappop(coming)
            arrival = workload.arrivals[index]
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            # Prompts of their own, so that the engine's prefix cache finds nothing of another request.
            scheduler.add(Request(str(index), [1000 + index] * arrival.prompt_tokens, params))
            sent[str(index)], tokens[str(index)] = at_s, []
        step = scheduler.schedule()
        n = step.n_decodes
        rows = list(enumerate(step.requests))
        chunks = [Chunk(step.starts[i], step.counts[i], step.samples(i)) for i, _ in rows[n:]]
        context = sum(step.starts[:n]) / n if n else 0.0
        now += seconds(n, context, chunks) if step.requests else 0.0
        sampled = [int(request.id) if step.samples(i) else None for i, request in rows]
        for i, request in rows:
            if sampled[i] is not None:
                tokens[request.id].append(now)
        for request in scheduler.update(step, sampled):
            times, n_output = tuple(tokens[request.id]), request.n_output
            at_s = sent[request.id]
            records.append(RequestRecord(int(request.id), at_s, at_s, times, now, request.n_prompt, n_output))
            if rest:
                heapq.heappush(coming, (now + workload.turnaround_s, rest.pop(0)[0]))
    return summarise(records)


@pytest.mark.parametrize(
    "workload",
    [Workload.closed(1, 5, 100, 20), Workload.closed(6, 60, Uniform(10, 200), Uniform(1, 90), seed=1),
     Workload.closed(12, 80, 64, 64), Workload.open(15.0, 80, Uniform(10, 300), Uniform(1, 90), seed=2)],
    ids=["alone", "closed", "waves", "Poisson"],
)  # fmt: skip
def test_simulated_latencies_are_those_that_bench_measures(workload: Workload) -> None:
    found = simulate(workload, POLICIES["twostroke"], seconds, PAGES)
    expected = measured(workload)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        simulated, true = getattr(found, name), getattr(expected, name)
        assert simulated.n == true.n, name
        for what in ("mean", "median", "p90", "p95", "p99"):
            assert getattr(simulated, what) == pytest.approx(getattr(true, what), rel=1e-9), (name, what)
    for name in ("duration_s", "requests_per_s", "output_tok_per_s", "peak_concurrency"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
    assert (found.preemptions > 0) == (workload.users == 12)
