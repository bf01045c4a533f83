"""Pages are loaded only where that is faster than computing them: what is expected of both, and a tier on a machine whose
clock, disk and page cache are ours."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from twostroke.engine.speculation.lengths import StepTimes
from twostroke.engine.tiers import disk
from twostroke.engine.tiers.disk import DiskTier, PageStore
from twostroke.engine.tiers.images import Bytes, PageImages
from twostroke.engine.tiers.load_times import DISK_BYTES_PER_S, FIRST_WAIT_S, Load, LoadTimes, PromptTimes
from twostroke.engine.tiers.page_file import PageFile
from twostroke.scheduling.prefix_tree import PrefixTree
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.step import ScheduledStep

BLOCK, PAGE_TOKENS, BUDGET = 4096, 16, 512
LENGTHS = (100, 500, 2000)


def load_of(n: int, work_s: float, first_wait_s: float, wait_s: float) -> Load:
    """``n`` pages, of which each waits for the disk."""
    load = Load()
    for i in range(n):
        waited_s = wait_s if i else first_wait_s
        load.add(work_s + waited_s, waited_s)
    return load


def test_a_first_wait_is_told_apart_from_those_behind_it() -> None:
    times = LoadTimes(10_000)
    times.saw(load_of(6, 1e-5, 1e-3, 1e-4))
    assert times.seconds(100, in_memory=True) == pytest.approx(100 * 1e-5)
    assert times.seconds(100, in_memory=False) == pytest.approx(100 * 1e-5 + 1e-3 + 100 * 1e-4)


def test_a_disk_that_was_never_waited_for_is_taken_for_a_slow_one() -> None:
    times = LoadTimes(10_000)
    times.saw(load_of(6, 1e-5, 0.0, 0.0))
    assert times.seconds(6, in_memory=True) == pytest.approx(6e-5)
    assert times.seconds(6, in_memory=False) == pytest.approx(6e-5 + FIRST_WAIT_S + 6 * 10_000 / DISK_BYTES_PER_S)


def test_what_is_expected_moves_half_way_to_the_newest_load() -> None:
    times = LoadTimes(1)
    times.saw(load_of(8, 1e-5, 1e-3, 1e-4))
    times.saw(load_of(8, 1e-5, 1e-1, 4e-4))
    assert times.seconds(1, in_memory=False) == pytest.approx(1e-5 + 1e-2 + 2e-4)
    times.renew(load_of(8, 9.0, 9.0, 9.0))  # the writing thread waits for others
    assert times.seconds(1, in_memory=False) == pytest.approx(1e-5 + 1e-2 + 2e-4)
    times.renew(load_of(8, 1e-5, 1e-3, 1e-4))
    assert times.seconds(1, in_memory=False) == pytest.approx(1e-5 + 5.5e-3 + 1.5e-4)
    times.saw(load_of(8, 1e-5, 0.5e-3, 0.5e-4))
    assert times.seconds(1, in_memory=False) == pytest.approx(1e-5 + 3e-3 + 1e-4)


def test_a_prompt_is_expected_to_take_as_long_as_undisturbed() -> None:
    times = PromptTimes(StepTimes(lambda rows: 1e-3 * rows, BUDGET))
    times.saw(100, 5.0)  # fifty times as long as planned
    assert times.seconds(100) == pytest.approx(0.1 * 1.1)
    times.saw(100, 0.05)
    assert times.seconds(100) == pytest.approx(0.05)
    assert times.seconds(512) == pytest.approx(0.256)  # no step of so many was seen
    for _ in range(40):
        times.saw(512, 0.7)
    assert times.seconds(512) == pytest.approx(0.7)
    assert times.seconds(100) == pytest.approx(0.05)
    times.saw(100, 0.0125)
    assert times.seconds(100) == pytest.approx(0.025)  # half way


class Machine:
    """A clock that reading, copying and computing move. A wait for the disk is ``seek_s`` where it does not go on near the last
    one, and 5 µs a block; a read, its check and a copy take 5 µs each and 0.2 ns a byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.seek_s = 0.0, 1e-3
        self.written: set[int] = set()  # blocks
        self.cached: set[int] = set()
        self._head = -BLOCK  # behind the last block that was read from the disk
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "posix_fadvise", self.posix_fadvise)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], at: int, flags: int = 0) -> int:
        n = self._preadv(descriptor, buffers, at)
        blocks = range(at // BLOCK, -(-(at + n) // BLOCK))
        missing = [block for block in blocks if block not in self.cached]
        if missing and flags:
            raise BlockingIOError
        if missing:
            goes_on = 0 <= missing[0] - self._head < 32
            self.now += (0.0 if goes_on else self.seek_s) + 5e-6 * len(missing)
            self.cached.update(missing)
            self._head = missing[-1] + 1
        self.now += 5e-6 + 2e-10 * n
        return n

    def posix_fadvise(self, descriptor: int, at: int, n: int, advice: int) -> None:
        self.cached -= set(range(at // BLOCK, (at + n) // BLOCK))

    def forget(self) -> None:
        """The page cache is empty, and others have used the disk."""
        self.cached, self._head = set(), -BLOCK

    def step_s(self, rows: int) -> float:
        """Of a step with ``rows`` of a prompt."""
        return 2e-4 + 7e-6 * rows

    def computed_s(self, tokens: int) -> float:
        steps, rest = divmod(tokens, BUDGET)
        return steps * self.step_s(BUDGET) + (self.step_s(rest) if rest else 0.0)


class Images(PageImages):
    machine: Machine

    def copy_out(self, page: int, into: Bytes) -> None:
        super().copy_out(page, into)
        self.machine.now += 5e-6

    def copy_in(self, page: int, image: Bytes) -> None:
        super().copy_in(page, image)
        self.machine.now += 5e-6


def request_of(length: int) -> Request:
    """One whose tokens and keys are those of its length."""
    request = Request(str(length), [length] * length, SamplingParams())
    n_pages = length // PAGE_TOKENS
    request.pages, request.page_keys = list(range(n_pages)), [f"{length}-{i}".encode().ljust(16) for i in range(n_pages)]
    return request


def tier_of(machine: Machine, path: Path, planned: float) -> DiskTier:
    """A tier that was just opened and whose file has the prompts of ``LENGTHS``. Steps are planned to take ``planned`` times
    what they do."""
    images = Images([np.zeros((1, 128, 10_240), np.uint8)])
    images.machine = machine
    file = PageFile(os.open(path, os.O_RDWR | os.O_CREAT), bytes(32), PAGE_TOKENS, images.n_bytes)
    file.begin()
    store, record = PageStore(file, 2**26), file.records.record()
    for length in LENGTHS:
        file.records.set_tokens(record, [length] * PAGE_TOKENS)
        for key in request_of(length).page_keys:
            assert store.write(key, record, ())
    machine.written.update(range(os.fstat(file.descriptor).st_size // BLOCK + 1))
    machine.cached.update(machine.written)
    times = PromptTimes(StepTimes(lambda rows: planned * machine.step_s(rows), BUDGET))
    return DiskTier(store, PrefixTree(), images, PAGE_TOKENS, BUDGET, times)


def answered_s(machine: Machine, tier: DiskTier, length: int, slowed: float = 1.0) -> float:
    """Seconds to the first token, of a prompt whose steps take ``slowed`` times as long as undisturbed."""
    request, began = request_of(length), machine.now
    n = tier.worth(request, 0, (length - 1) // PAGE_TOKENS)
    n = tier.load(request, 0, n, bounded=False) if n else 0
    left, before = length - n * PAGE_TOKENS, began
    while left:
        rows = min(left, BUDGET)
        left -= rows
        machine.now += slowed * machine.step_s(rows)
        tier.saw(ScheduledStep(1, [request], [rows], [0], 0, [], []), machine.now - before)
        before = machine.now
    return machine.now - began


@pytest.mark.parametrize("planned", [0.5, 1.0, 3.0])
def test_no_prompt_is_answered_later_because_its_pages_are_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: float
) -> None:
    machine = Machine(monkeypatch)
    tier = tier_of(machine, tmp_path / "pages.kv", planned)
    for slowed in (5.0, 1.0):  # prompts that are not in the file, of which the first touches everything for the first time
        for length in (101, 512):
            answered_s(machine, tier, length, slowed)
    for _ in range(4):
        for cold in (True, False):
            for length in LENGTHS:
                machine.forget()
                if not cold:
                    machine.cached.update(machine.written)
                taken_s, computed_s = answered_s(machine, tier, length), machine.computed_s(length)
                assert taken_s <= computed_s * (1 + 1e-9)
                if length == 2000 or not cold:
                    assert taken_s < computed_s / 2  # so it was loaded
                if length == 100 and cold:
                    assert taken_s == pytest.approx(computed_s)  # refused: six pages take as long as the way to the first
    tier.close()


def test_a_disk_that_was_slow_once_is_loaded_from_again_and_no_request_tries_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch)
    tier = tier_of(machine, tmp_path / "pages.kv", 1.0)
    computed_s, taken_s = machine.computed_s(2000), list[float]()
    machine.forget()
    machine.seek_s = 0.1
    assert answered_s(machine, tier, 2000) > computed_s
    machine.seek_s = 1e-3
    while tier.counts().hit_tokens < 4000 - 2 * PAGE_TOKENS and len(taken_s) < 10 * disk._RENEWED:
        machine.forget()
        taken_s.append(answered_s(machine, tier, 2000))
        tier.wait_written()
    assert disk._RENEWED < len(taken_s) <= 4 * disk._RENEWED + 1
    assert taken_s[:-1] == pytest.approx([computed_s] * (len(taken_s) - 1))
    assert taken_s[-1] < computed_s / 2
    tier.close()


def test_what_the_page_cache_forgot_is_told_from_what_it_has(tmp_path: Path) -> None:
    file = PageFile(os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT), bytes(32), PAGE_TOKENS, 10_240)
    file.begin()
    record = file.records.record()
    entry = file.write(0, b"k" * 16, 1, record)
    if not file.in_memory(0):
        pytest.skip("the file system does not tell what its page cache has")
    assert file.read(0, entry, record) == (True, 0.0)
    os.fsync(file.descriptor)
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not file.in_memory(0)
    read = file.read(0, entry, record)
    assert read.whole
    assert read.waited_s >= 0
    assert file.in_memory(0)
    file.close()
