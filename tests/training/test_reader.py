from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twostroke.core.errors import CorruptFileError
from twostroke.training.checkpoint import MODEL, Checkpoint, save_checkpoint
from twostroke.training.reader import CheckpointReader
from twostroke.training.retention import Retention


def _save(folder: Path, step: int) -> Path:
    return save_checkpoint(folder, Checkpoint({"w": torch.ones(2) * step}, {}, {"step": step}), Retention(5))


def test_it_finds_what_is_there_and_names_what_is_damaged(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    (_save(tmp_path, 2) / MODEL).write_bytes(b"")
    lines: list[str] = []
    reader = CheckpointReader(tmp_path, lines.append)
    assert reader.will_find
    found = reader.get()
    assert found is not None
    assert found.state["step"] == 1
    assert len(lines) == 1
    assert "step-00000002 is damaged" in lines[0]
    assert reader.get() is found
    assert len(lines) == 1


def test_where_nothing_is_there_it_finds_nothing(tmp_path: Path) -> None:
    reader = CheckpointReader(tmp_path / "none", print)
    assert not reader.will_find
    assert reader.get() is None


def test_where_all_are_damaged_it_raises_in_the_thread_that_asks(tmp_path: Path) -> None:
    (_save(tmp_path, 1) / MODEL).write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"all checkpoints in .* are damaged"):
        CheckpointReader(tmp_path, print).get()
