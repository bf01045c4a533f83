from __future__ import annotations

import os
from pathlib import Path

import pytest

from twostroke.calibration import process
from twostroke.calibration.process import measure_disk
from twostroke.core.units import MIB


def test_no_file_is_written_over_pages_that_another_has_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache takes a file several times as fast over such pages as over those that a model meets."""
    monkeypatch.setattr(process, "home", lambda: tmp_path)
    sizes, flush = [], os.fsync

    def flushed(descriptor: int) -> None:
        flush(descriptor)
        sizes.append([file.stat().st_size for file in tmp_path.rglob("block*")])

    monkeypatch.setattr(os, "fsync", flushed)
    write, read = measure_disk(8 * MIB)
    assert sizes == [[8 * MIB], [8 * MIB] * 2]
    assert min(write, read) > 0
    assert list(tmp_path.iterdir()) == []
