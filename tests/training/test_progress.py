"""Marks of ranks, as a launcher reads them from memory that the rank writes at the same time."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
import tempfile

import pytest

from twostroke.training.progress import BUSY_FLOOR_S, PAGE_BYTES, Marks, Phase, Progress, read_marks

READS = 100_000


def _write_for_ever(pages: int) -> None:
    progress = Progress(mmap.mmap(pages, 0), 1)
    for step in range(sys.maxsize):
        progress.mark((Phase.STEPS, Phase.BUILDING)[step % 2], step)


@pytest.mark.skipif(sys.platform == "win32", reason="the page is handed down by a fork")
def test_a_reader_never_sees_half_a_mark() -> None:
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), 2 * PAGE_BYTES)
        pages = mmap.mmap(file.fileno(), 0)
        assert read_marks(pages, 1) == Marks()
        writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(file.fileno(),), daemon=True)
        writer.start()
        try:
            seen = [read_marks(pages, 1) for _ in range(READS)]
        finally:
            writer.kill()
            writer.join()
        assert {marks.count - marks.step for marks in seen if marks.count} == {1}
        assert {marks.busy_limit_s for marks in seen if marks.phase == Phase.STEPS} <= {BUSY_FLOOR_S, float("inf")}
        assert [marks.count for marks in seen] == sorted(marks.count for marks in seen)
        assert seen[-1].count > 10
        assert read_marks(pages, 1).count >= seen[-1].count  # the writer was killed, perhaps while it wrote
        assert read_marks(pages, 0) == Marks()
        pages.close()
