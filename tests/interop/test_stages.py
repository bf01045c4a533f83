from __future__ import annotations

import threading
import time

import pytest

from twostroke.interop import stages as module
from twostroke.interop.export_targets import TARGETS
from twostroke.interop.stages import Stages


def test_a_stage_that_lasts_is_named_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    told: list[tuple[float, str]] = []
    ticked = threading.Event()

    def progress(share: float, note: str) -> None:
        told.append((share, note))
        if note.startswith("lowering, "):  # the stage before it may last long enough on a busy machine
            ticked.set()

    stages = Stages(("tracing", "lowering"), progress)
    stages.read(0.5, "tensor 1 of 2")
    with stages.stage("tracing"):
        pass
    with stages.stage("lowering"):
        assert ticked.wait(10)  # while this thread is busy with something else
    assert told[0] == (0.5 / 3, "tensor 1 of 2")
    assert (1 / 3, "tracing") in told
    assert any(note.startswith("lowering, ") and note.endswith("s") and share == 2 / 3 for share, note in told)
    assert told[-1] == (1.0, "lowering")
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    n_told = len(told)
    time.sleep(0.05)
    assert len(told) == n_told  # nothing after its end


def test_an_error_ends_the_words_on_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.001)
    with (
        pytest.raises(RuntimeError, match="of the compiler"),
        Stages(("lowering",), lambda share, note: None).stage("lowering"),
    ):
        raise RuntimeError("of the compiler")
    assert not any(thread.name.startswith("export: ") for thread in threading.enumerate())


def test_exports_by_other_programs_compilers_have_stages() -> None:
    assert all(TARGETS[name].stages for name in ("coreml", "executorch", "litert"))
