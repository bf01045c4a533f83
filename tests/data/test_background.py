from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from token_stubs import StubTokens

from twostroke.core.errors import InputError, TwostrokeError
from twostroke.data.background import BackgroundLoader
from twostroke.data.conversation_loader import ConversationLoader
from twostroke.data.loader import Batch, MixedSource, PackedLoader, ShuffledLoader

LENGTH = 16
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def tokens(tmp_path: Path) -> StubTokens:
    """Tokens that tell their place; every 37th is an end of text."""
    numbers = np.arange(1, 40_001)
    numbers[36::37] = 0
    return StubTokens(tmp_path, numbers)


def mixture() -> list[MixedSource]:
    return [MixedSource("a", 0, 9_001, 0.7), MixedSource("b", 9_001, 1_999, 0.1), MixedSource("c", 11_000, 29_000, 0.2)]


def plain(tokens: StubTokens, batch_size: int = 4) -> ShuffledLoader:
    return PackedLoader(tokens, batch_size, LENGTH, seed=3)


def mixed(tokens: StubTokens, batch_size: int = 4) -> ShuffledLoader:
    return PackedLoader(tokens, batch_size, LENGTH, 3, mixture())


def conversations(tokens: StubTokens, batch_size: int = 4) -> ShuffledLoader:
    return ConversationLoader(tokens, batch_size, LENGTH, 3, "cut", mixture())


Make = Callable[..., ShuffledLoader]
KINDS = [plain, mixed, conversations]


def equal(a: Batch, b: Batch) -> bool:
    names = ("tokens", "targets", "positions", "documents")
    return a.n_valid == b.n_valid and all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


@pytest.fixture
def close() -> Iterator[Callable[[BackgroundLoader], BackgroundLoader]]:
    opened: list[BackgroundLoader] = []

    def keep(loader: BackgroundLoader) -> BackgroundLoader:
        opened.append(loader)
        return loader

    yield keep
    for loader in opened:
        loader.close()


Close = Callable[[BackgroundLoader], BackgroundLoader]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_and_states_are_those_of_the_loader_itself(tokens: StubTokens, close: Close, make: Make, workers: int) -> None:
    reference, loader = make(tokens), close(BackgroundLoader(make(tokens), workers))
    assert loader.state() == reference.state()
    for _ in range(300):
        assert equal(loader.next_batch(), reference.next_batch())
        assert loader.state() == reference.state()
        assert loader.epoch == reference.epoch


@pytest.mark.parametrize("make", KINDS)
def test_killed_and_resumed_with_other_workers_no_sample_is_skipped_or_repeated(
    tokens: StubTokens, close: Close, make: Make
) -> None:
    """Four lives with 0, 1, 3 and 0 workers and other batch sizes; each is left in the middle, with batches prepared ahead."""
    reference, state = make(tokens, 2), make(tokens).state()
    for workers, batch_size, n_batches in [(0, 4, 251), (1, 2, 300), (3, 8, 101), (0, 2, 100)]:
        loader = close(BackgroundLoader(make(tokens, batch_size), workers))
        loader.restore(state)
        for _ in range(n_batches):
            batch = loader.next_batch()
            expected = [reference.next_batch() for _ in range(batch_size // 2)]
            assert torch.equal(batch.tokens, torch.cat([e.tokens for e in expected]))
            assert torch.equal(batch.targets, torch.cat([e.targets for e in expected]))
        state = loader.state()
        assert state == reference.state()


def one_million(loader_of: Callable[[], ShuffledLoader]) -> np.ndarray:
    """Requests of 1,000,000 windows by a loader that is dropped and restored at another place each time."""
    rng, state, requests, done = np.random.default_rng(0), loader_of().state(), [], 0
    while done < 1_000_000:
        loader = loader_of()
        loader.restore(state)
        for _ in range(int(rng.integers(1, 8))):
            requests.append(loader.next_request())
            done += loader.batch_size
        state = loader.state()
    return np.concatenate(requests)[:1_000_000]


def test_a_million_samples_resumed_hundreds_of_times_are_each_window_once_an_epoch(tmp_path: Path) -> None:
    tokens = StubTokens(tmp_path, np.ones(300_007 * LENGTH + 5, dtype=np.int64), dtype="<u2")
    sizes = iter(np.random.default_rng(1).integers(500, 3000, 10_000).tolist())
    found = one_million(lambda: PackedLoader(tokens, next(sizes), LENGTH, seed=5))
    whole = PackedLoader(tokens, 1_000_000, LENGTH, seed=5).next_request()
    assert np.array_equal(found, whole)
    for epoch in range(3):
        starts = found[epoch * 300_007 : (epoch + 1) * 300_007, 2]
        windows = np.unique((starts - starts.min()) // LENGTH)
        assert len(np.unique(starts)) == 300_007, "no window twice"
        assert len(windows) >= 300_006


def test_a_million_samples_of_a_mixture_resumed_hundreds_of_times(tmp_path: Path) -> None:
    tokens = StubTokens(tmp_path, np.ones(4_000_000, dtype=np.int64), dtype="<u2")
    sizes = iter(np.random.default_rng(1).integers(500, 3000, 10_000).tolist())
    sources = [
        MixedSource("a", 0, 2_000_000, 0.6),
        MixedSource("b", 2_000_000, 500_000, 0.3),
        MixedSource("c", 2_500_000, 1_500_000, 0.1),
    ]
    found = one_million(lambda: PackedLoader(tokens, next(sizes), LENGTH, 5, sources))
    assert np.array_equal(found, PackedLoader(tokens, 1_000_000, LENGTH, 5, sources).next_request())
    for source, share in zip(sources, (600_000, 300_000, 100_000), strict=True):
        starts = found[found[:, 0] == source.first_token, 2]
        assert len(starts) == share, "decimal weights are met exactly"
        n_windows = source.n_tokens // LENGTH
        for epoch in range(share // n_windows):
            assert len(np.unique(starts[epoch * n_windows : (epoch + 1) * n_windows])) == n_windows


@pytest.mark.parametrize("ahead", [1, 2, 17])
def test_the_state_does_not_depend_on_how_far_the_background_is(tokens: StubTokens, close: Close, ahead: int) -> None:
    loader = close(BackgroundLoader(mixed(tokens), 0, ahead))
    for _ in range(5):
        loader.next_batch()
    time.sleep(0.05)  # let it run ahead
    reference = mixed(tokens)
    for _ in range(5):
        reference.next_batch()
    assert loader.state() == reference.state()
    loader.close()
    assert equal(loader.next_batch(), reference.next_batch()), "a closed one goes on where the last batch was handed out"


def test_an_earlier_state_is_restored_in_the_middle(tokens: StubTokens, close: Close) -> None:
    loader = close(BackgroundLoader(plain(tokens), 1))
    loader.next_batch()
    state, second = loader.state(), loader.next_batch()
    for _ in range(7):
        loader.next_batch()
    with pytest.raises(InputError, match=r"saved with seed=99"):
        loader.restore(state | {"seed": 99})
    assert loader.state()["next_window"] == 9 * 4, "a refused state changes nothing"
    loader.restore(state)
    assert equal(loader.next_batch(), second)


def test_a_killed_worker_is_replaced_and_nothing_is_lost(tokens: StubTokens, close: Close) -> None:
    reference, loader = plain(tokens), close(BackgroundLoader(plain(tokens), 2))
    for i in range(60):
        if i % 20 == 10:
            for child in psutil.Process().children():
                if "twostroke.data.batch_worker" in child.cmdline():
                    os.kill(child.pid, signal.SIGKILL)
        assert equal(loader.next_batch(), reference.next_batch())


def test_a_worker_that_never_lives_is_a_sentence(tokens: StubTokens, close: Close, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    loader = close(BackgroundLoader(plain(tokens), 1))
    for _ in range(2):
        with pytest.raises(TwostrokeError, match=r"ended 4 times, at last with code 1.*data.workers=0"):
            loader.next_batch()


def test_an_error_in_the_background_is_raised_where_the_batch_is_taken(
    tokens: StubTokens, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = plain(tokens)
    loader = close(BackgroundLoader(inner))
    loader.next_batch()
    monkeypatch.setattr(inner.builder, "build", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match=r"Input/output error"):
        [loader.next_batch() for _ in range(4)]  # two were prepared before


def test_a_batch_that_no_memory_holds_is_an_error_where_it_is_taken(tokens: StubTokens, close: Close) -> None:
    """It ended the thread, and the training thread waited for ever."""
    loader = close(BackgroundLoader(plain(tokens, 10**15)))
    for _ in range(2):
        with pytest.raises(MemoryError):
            loader.next_batch()


def test_a_loader_that_is_forgotten_leaves_neither_threads_nor_processes(tokens: StubTokens) -> None:
    before = threading.active_count()
    loader = BackgroundLoader(plain(tokens), 1)
    loader.next_batch()
    assert threading.active_count() == before + 1
    del loader
    gc.collect()
    assert threading.active_count() == before
    assert not [p for p in psutil.Process().children() if "twostroke.data.batch_worker" in p.cmdline()]


def test_a_worker_ends_with_the_process_that_asks(tokens: StubTokens) -> None:
    """Also when that one is killed: its end of the pipe closes either way."""
    process = subprocess.Popen([sys.executable, "-m", "twostroke.data.batch_worker"], stdin=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdin is not None
    process.stdin.write(json.dumps(plain(tokens).builder.description()).encode() + b"\n")
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def test_a_worker_starts_without_torch() -> None:
    code = "import sys, twostroke.data.batch_worker; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0
