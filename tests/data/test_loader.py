from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.data.loader import Batch, PackedLoader
from twostroke.data.packing import document_layout
from twostroke.data.shards import TokenStream

EOS = 0


@dataclass
class Stub:
    """Prepared data of given tokens, in one or two shards."""

    directory: Path
    tokens: np.ndarray
    cut: int = 0
    key: str = "0123456789abcdef0123"
    eos_id: int = EOS

    def train_tokens(self) -> TokenStream:
        paths = []
        for i, part in enumerate((self.tokens[: self.cut], self.tokens[self.cut :])):
            paths.append(self.directory / f"{i}.bin")
            part.astype("<u2").tofile(paths[-1])
        return TokenStream(paths, "<u2")


def numbered(n: int) -> np.ndarray:
    """Tokens that tell their place: 1 … n. None is an end-of-text."""
    return np.arange(1, n + 1)


def random_documents(n: int, seed: int = 0, mean_length: int = 20) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 1000, n)
    tokens[rng.random(n) < 1 / mean_length] = EOS
    tokens[-1] = EOS
    return tokens


def epoch_windows(loader: PackedLoader) -> list[list[int]]:
    rows: list[list[int]] = []
    while len(rows) < loader.windows_per_epoch:
        rows += loader.next_batch().tokens.tolist()
    return rows[: loader.windows_per_epoch]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(1, 40), n=st.integers(1, 400), seed=st.integers(0, 2**32))
def test_every_token_is_in_exactly_one_window_of_an_epoch(
    data: st.DataObject, length: int, n: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if n < length:
        n = length
    prepared = Stub(tmp_path_factory.mktemp("stub"), numbered(n), cut=data.draw(st.integers(0, n)))
    loader = PackedLoader(prepared, data.draw(st.integers(1, 5)), length, seed)
    seen = sorted(t for row in epoch_windows(loader) for t in row)
    assert len(seen) == len(set(seen)) == n // length * length
    missing = sorted(set(range(1, n + 1)) - set(seen))
    assert len(missing) == n % length
    # What is left out lies together on the ring, before the epoch's offset.
    gaps = sum(1 for i, t in enumerate(missing) if t - 1 != (missing[i - 1] if i else missing[-1] - n))
    assert gaps <= 1


def test_epochs_differ_in_order_and_in_where_they_cut(tmp_path: Path) -> None:
    loader = PackedLoader(Stub(tmp_path, numbered(1003)), 1, 10, seed=5)
    first, second = epoch_windows(loader), epoch_windows(loader)
    assert {row[0] % 10 for row in first[:20]} != {row[0] % 10 for row in second[:20]}
    assert [row[0] for row in first] != sorted(row[0] for row in first)


def slow_rows(stream: list[int], start: int, length: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """One token at a time: tokens, targets, positions, documents."""
    tokens, targets, positions, documents = [], [], [], []
    position = document = 0
    for i in range(length):
        token, following = stream[(start + i) % len(stream)], stream[(start + i + 1) % len(stream)]
        tokens.append(token)
        targets.append(-100 if token == EOS else following)
        positions.append(position)
        documents.append(document)
        position += 1
        if token == EOS:
            position, document = 0, document + 1
    return tokens, targets, positions, documents


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 60), n=st.integers(60, 300), mean=st.integers(1, 40))
def test_batches_equal_one_token_at_a_time(
    seed: int, length: int, n: int, mean: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stream = random_documents(n, seed, mean)
    loader = PackedLoader(Stub(tmp_path_factory.mktemp("stub"), stream, cut=n // 3), 3, length, seed)
    other = PackedLoader(Stub(tmp_path_factory.mktemp("stub"), stream), 3, length, seed)
    for _ in range(4):
        batch, request = loader.next_batch(), other.next_request()
        expected = [slow_rows(stream.tolist(), int(first + start), length) for first, _, start in request]
        found = (batch.tokens, batch.targets, batch.positions, batch.documents)
        for i, tensor in enumerate(found):
            assert tensor.tolist() == [row[i] for row in expected]
            assert tensor.dtype == (torch.int32 if i == 3 else torch.int64)
            assert tensor.is_contiguous()
        assert batch.n_valid == int((batch.targets != -100).sum())


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "targets", "positions", "documents"))


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 30), seed=st.integers(0, 1000))
def test_a_restored_loader_continues_exactly(before: int, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    prepared = Stub(tmp_path_factory.mktemp("stub"), random_documents(500, seed))
    loader = PackedLoader(prepared, 4, 32, seed)
    for _ in range(before):
        loader.next_batch()
    state = json.loads(json.dumps(loader.state()))
    expected = [loader.next_batch() for _ in range(10)]  # over the end of an epoch of 15 windows
    resumed = PackedLoader(prepared, 4, 32, seed)
    resumed.restore(state)
    assert all(equal(resumed.next_batch(), batch) for batch in expected)
    assert resumed.state() == loader.state()


def test_a_state_restores_at_another_batch_size(tmp_path: Path) -> None:
    prepared = Stub(tmp_path, numbered(1000))
    loader = PackedLoader(prepared, 6, 10, 0)
    loader.next_batch()
    resumed = PackedLoader(prepared, 2, 10, 0)
    resumed.restore(loader.state())
    rows = [row for _ in range(3) for row in resumed.next_batch().tokens.tolist()]
    assert rows == loader.next_batch().tokens.tolist()


def test_a_state_of_other_data_or_settings_is_refused(tmp_path: Path) -> None:
    prepared = Stub(tmp_path, numbered(1000))
    state = PackedLoader(prepared, 2, 10, seed=1).state()
    loader = PackedLoader(prepared, 2, 10, seed=2)
    with pytest.raises(InputError, match=r"saved with seed=1, and this run has 2"):
        loader.restore(state)
    with pytest.raises(InputError, match=r"next_window=-1"):
        loader.restore(loader.state() | {"next_window": -1})
    with pytest.raises(InputError, match=r"data=None"):
        loader.restore({"next_window": 3, "seed": 2, "sequence_length": 10, "n_tokens": 1000})
    with pytest.raises(InputError, match=r"sequence_length=10, and this run has 20"):
        PackedLoader(prepared, 2, 20, seed=1).restore(state)
    assert loader.state()["next_window"] == 0


def test_too_little_text_and_impossible_sizes_are_sentences(tmp_path: Path) -> None:
    prepared = Stub(tmp_path, numbered(9))
    with pytest.raises(DataError, match=r"9 tokens, fewer than sequence_length=10"):
        PackedLoader(prepared, 1, 10, 0)
    with pytest.raises(ConfigError, match=r"batch_size=0"):
        PackedLoader(prepared, 0, 5, 0)
    assert PackedLoader(prepared, 1, 9, 0).next_batch().tokens.shape == (1, 9)


def test_batches_move_between_devices_whole(tmp_path: Path) -> None:
    batch = PackedLoader(Stub(tmp_path, numbered(100)), 2, 10, 0).next_batch()
    moved = batch.to("cpu")
    assert equal(moved, batch)
    assert moved.n_valid == batch.n_valid


def test_layout_counts_documents_from_each_row() -> None:
    positions, documents = document_layout(np.array([[5, 0, 6, 7, 0, 0, 8], [1, 2, 3, 4, 5, 6, 0]]), EOS)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0] * 7]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), max_size=5))
def test_a_stream_of_shards_slices_like_one_array(
    data: st.DataObject, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    whole = np.arange(sum(sizes), dtype="<u4")
    paths = []
    for i, part in enumerate(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []):
        paths.append(directory / f"{i}.bin")
        part.tofile(paths[-1])
    stream = TokenStream(paths, "<u4")
    assert len(stream) == len(whole)
    start, stop = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    assert np.array_equal(stream[start:stop], whole[start:stop])
    assert np.array_equal(stream[:], whole)
