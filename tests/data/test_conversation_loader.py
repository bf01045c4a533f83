from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import DataError, InputError
from twostroke.data.conversation_loader import ConversationLoader, pack_rows
from twostroke.data.conversations import BEGINS, LEARNED
from twostroke.data.packing import IGNORE_INDEX
from twostroke.data.shards import TokenStream

EOS = 9


@dataclass
class Stub:
    """Conversations of given (tokens, learned)."""

    directory: Path
    conversations: list[tuple[list[int], list[int]]]
    key: str = "0123456789abcdef0123"
    eos_id: int = EOS

    def _stream(self, name: str, values: list[int], dtype: str) -> TokenStream:
        path = self.directory / name
        np.asarray(values, dtype=dtype).tofile(path)
        return TokenStream([path], dtype)

    def train_tokens(self) -> TokenStream:
        return self._stream("t.bin", [t for tokens, _ in self.conversations for t in tokens], "<u2")

    def train_marks(self) -> TokenStream:
        marks = [
            LEARNED * flag | (BEGINS if i == 0 else 0) for _, learned in self.conversations for i, flag in enumerate(learned)
        ]
        return self._stream("m.bin", marks, "<u1")


def conversation(number: int, length: int, n_learned: int) -> tuple[list[int], list[int]]:
    """Tokens that name their conversation and place; the last ``n_learned`` are learned. End-of-text in the middle too."""
    tokens = [100 * number + i for i in range(length)]
    if length > 3:
        tokens[1] = EOS  # the end of a message does not end the conversation
    return tokens, [0] * (length - n_learned) + [1] * n_learned


def make(tmp_path: Path, lengths: list[int], **options: object) -> ConversationLoader:
    stub = Stub(tmp_path, [conversation(n + 1, length, max(1, length // 2)) for n, length in enumerate(lengths)])
    return ConversationLoader(stub, 2, 16, seed=3, **options)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), row=st.integers(20, 64))
def test_packing_keeps_every_conversation_once_and_within_rows(lengths: list[int], row: int) -> None:
    rows = pack_rows(lengths, row)
    assert sorted(i for r in rows for i in r) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in r) <= row for r in rows)
    # No two rows would fit into one: a packing that leaves less than that is never twice the fewest rows.
    fills = sorted(sum(lengths[i] for i in r) for r in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > row


def test_targets_positions_and_documents_token_by_token(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [([11, EOS, 12, 13, EOS], [0, 0, 1, 0, 1]), ([21, 22, EOS], [0, 1, 1])])
    batch = ConversationLoader(stub, 1, 10, seed=0).next_batch()
    _ = IGNORE_INDEX
    assert batch.tokens.tolist() == [[11, EOS, 12, 13, EOS, 21, 22, EOS, EOS, EOS]]
    assert batch.targets.tolist() == [[_, 12, _, EOS, _, 22, EOS, _, _, _]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.n_valid == 4


def test_an_epoch_has_every_conversation_once_and_the_next_has_another_order(tmp_path: Path) -> None:
    loader = make(tmp_path, [5, 9, 16, 3, 7, 12, 4, 8, 2, 11, 6, 10])
    orders = []
    for _ in range(2):
        seen: list[int] = []
        for _ in range(loader.windows_per_epoch):
            loader.batch_size = 1
            batch = loader.next_batch()
            seen += [int(t) // 100 for t, p in zip(batch.tokens[0], batch.positions[0], strict=True) if p == 0 and t != EOS]
        assert sorted(seen) == list(range(1, 13))
        orders.append(seen)
    assert orders[0] != orders[1]
    assert loader.epoch == 2.0


def test_resumed_at_another_batch_size_no_row_is_skipped_or_repeated(tmp_path: Path) -> None:
    lengths = [5, 9, 16, 3, 7, 12, 4, 8, 2, 11, 6, 10]
    whole = make(tmp_path, lengths)
    rows = [r for _ in range(6) for r in whole.next_rows()]
    first = make(tmp_path, lengths)
    found = [r for _ in range(2) for r in first.next_rows()]
    second = make(tmp_path, lengths)
    second.restore(first.state())
    second.batch_size = 4
    found += [r for _ in range(2) for r in second.next_rows()]
    assert found == rows


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    state = make(tmp_path, [5, 9]).state()
    with pytest.raises(InputError, match="n_tokens=14, and this run has 15"):
        make(tmp_path, [5, 10]).restore(state)


class TestTooLong:
    def test_cut_keeps_the_beginning(self, tmp_path: Path) -> None:
        loader = make(tmp_path, [20, 5])
        assert (loader.fitting.n_cut, loader.fitting.n_dropped) == (1, 0)
        assert 115 in loader.next_batch().tokens
        assert 116 not in loader.next_batch().tokens

    def test_cut_before_any_answer_is_left_out_and_counted(self, tmp_path: Path) -> None:
        stub = Stub(tmp_path, [conversation(1, 20, 2), conversation(2, 5, 2)])
        fitting = ConversationLoader(stub, 1, 16, seed=0).fitting
        assert (fitting.n_conversations, fitting.n_cut, fitting.n_dropped) == (1, 0, 1)

    def test_drop(self, tmp_path: Path) -> None:
        fitting = make(tmp_path, [20, 5], too_long="drop").fitting
        assert (fitting.n_conversations, fitting.n_cut, fitting.n_dropped) == (1, 0, 1)

    def test_error_names_the_longest(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"1 of 2 conversations are longer .*=16; the longest has 20"):
            make(tmp_path, [20, 5], too_long="error")

    def test_nothing_left_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"none of 1 conversations has an answer within train.sequence_length=16"):
            make(tmp_path, [20], too_long="drop")
