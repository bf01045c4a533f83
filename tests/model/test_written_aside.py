"""Directories that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import SafetensorError

from twostroke.model.save import written_aside


def test_a_full_disk_is_an_error_of_the_target_and_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "before").write_text("kept")

    def fill_the_disk() -> None:
        with written_aside(target) as aside:
            (aside / "half").write_text("written")
            raise SafetensorError("I/O error: No space left on device (os error 28)")  # as save_file does

    with pytest.raises(OSError, match="nothing of it was kept") as raised:
        fill_the_disk()
    assert raised.value.filename == str(target)
    assert "No space left" in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "before").read_text() == "kept"
