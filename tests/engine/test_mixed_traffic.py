"""Traffic of every kind at once, three in ten of it cancelled: afterwards the engine is exactly as it was."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path

import psutil
import pytest

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams

CANCELLED = 0.3


class Traffic:
    """Shared and own beginnings, forks, deadlines, penalties, scored prompts, and fewer pages than they want."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core, self.random = core, random.Random(seed)
        self.open: dict[str, int] = {}  # answers that have not ended
        self.n_sent = self.n_cancelled = 0
        self.reasons: dict[str, int] = {}
        self.beginnings = [[self.random.randrange(97) for _ in range(n)] for n in (16, 40, 64)]

    def send(self) -> None:
        r = self.random
        beginning = r.choice(self.beginnings) if r.random() < 0.6 else []
        prompt = beginning + [r.randrange(97) for _ in range(r.randint(1, 40))]
        params = SamplingParams(
            max_tokens=r.choice((1, 4, 16, 60)),
            temperature=r.choice((0.0, 1.0)),
            n=r.choice((1, 1, 1, 3)),
            top_p=r.choice((1.0, 0.9)),
            logprobs=r.choice((None, None, 2)),
            prompt_logprobs=r.choice((None, None, None, 1)),
            repetition_penalty=r.choice((1.0, 1.3)),
            ignore_eos=r.random() < 0.5,
        )
        name = f"r{self.n_sent}"
        timeout_s = r.choice((None, None, None, 0.02))
        self.core.add_request(name, prompt, params, r.choice((0, 0, 1)), r.choice("abc"), timeout_s)
        self.open[name] = params.n
        self.n_sent += 1

    def step(self) -> None:
        for event in self.core.step():
            assert event.request_id in self.open, "an event of a request that has ended"
            if event.finish_reason is not None:
                self.reasons[event.finish_reason] = self.reasons.get(event.finish_reason, 0) + 1
                self.open[event.request_id] -= 1
                if not self.open[event.request_id]:
                    del self.open[event.request_id]

    def cancel_some(self) -> None:
        # Each request is asked about three times in its life or so: 1 − 0.89³ ≈ 0.3.
        for name in [name for name in self.open if self.random.random() < 0.11]:
            if self.n_cancelled < CANCELLED * self.n_sent:
                self.core.abort(name)
                del self.open[name]
                self.n_cancelled += 1

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self.open) < 12 and self.random.random() < 0.7:
                self.send()
            for _ in range(self.random.randint(1, 8)):
                self.step()
            self.cancel_some()
        while self.core.has_work:
            self.step()


def _engine(folder: Path) -> EngineCore:
    directory = saved("llama", folder / "m")[1]
    config = EngineSettings(dtype="fp32", n_threads=1, page_tokens=8, max_running=8, token_budget=64, max_model_len=200)
    page_bytes = EngineCore(directory, config).kv_cache_bytes // EngineCore(directory, config).scheduler.config.n_pages
    small = EngineSettings(**vars(config) | {"kv_cache_bytes": 40 * page_bytes})
    return EngineCore(directory, small)


def _run(folder: Path, seconds: float) -> Traffic:
    core = _engine(folder)
    traffic = Traffic(core, seed=0)
    traffic.run(min(1.0, seconds))
    before = psutil.Process().memory_info().rss
    traffic.run(seconds)
    gc.collect()
    stats, scheduler = core.stats(), core.scheduler
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert scheduler.pool.n_free == scheduler.config.n_pages == 40
    assert sorted(scheduler.admission.slots) == list(range(scheduler.config.max_running))
    assert len(scheduler.pool.tree) == stats.pages_cached
    assert not scheduler.requests
    assert not core._answers.of_name
    assert not core._answers.names_of
    assert not core._prompt_scores._n_scored
    assert not core._prompt_scores.take()
    assert not traffic.open
    assert psutil.Process().memory_info().rss - before < 64e6  # nothing grows with the number of requests
    return traffic


def test_after_mixed_traffic_every_page_is_free(tmp_path: Path) -> None:
    traffic = _run(tmp_path, 2.0)
    assert traffic.n_sent > 20
    assert {"stop", "length"} <= traffic.reasons.keys()
    assert traffic.core.stats().preemptions > 0


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_after_half_an_hour_of_mixed_traffic_every_page_is_free(tmp_path: Path) -> None:
    traffic = _run(tmp_path, 1800.0)
    assert traffic.n_cancelled > 0.25 * traffic.n_sent
    assert {"stop", "length", "timeout"} <= traffic.reasons.keys()
