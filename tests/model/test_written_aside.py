"""Directories that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import SafetensorError

from twostroke.core.errors import InputError
from twostroke.model.save import require_writable, written_aside


def test_a_full_disk_is_an_error_of_the_target_and_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "before").write_text("kept")

    def fill_the_disk() -> None:
        with written_aside(target) as aside:
            (aside / "half").write_text("written")
            raise SafetensorError("I/O error: No space left on device (os error 28)")  # as save_file does

    with pytest.raises(OSError, match="the partial copy was removed") as raised:
        fill_the_disk()
    assert raised.value.filename == str(target)
    assert "No space left" in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "before").read_text() == "kept"


class TestReplacing:
    """``--replace`` of import, export and quantize, and the model of a run."""

    def test_a_model_directory_may_be_replaced(self, tmp_path: Path) -> None:
        names = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", f".packed/{32 * 'a'}.bin"]
        names.append("early_exit.json")  # of `twostroke exits`
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        require_writable(tmp_path, replace=True)
        with pytest.raises(InputError, match="is not empty"):
            require_writable(tmp_path, replace=False)

    @pytest.mark.parametrize(
        "name", ["thesis.odt", "notes/config.json", ".packed/thesis.bin", "checkpoint-5/model.safetensors"]
    )
    def test_a_directory_with_files_of_the_user_is_not_replaced(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "config.json").touch()
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        with pytest.raises(InputError, match=r"which Twostroke did not write.*Move it"):
            require_writable(tmp_path, replace=True)
        assert (tmp_path / name).exists()

    def test_a_link_to_a_directory_is_replaced_and_what_it_points_to_stays(self, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "config.json").write_text("precious")
        (tmp_path / "model").symlink_to(elsewhere)
        require_writable(tmp_path / "model", replace=True)
        with written_aside(tmp_path / "model") as aside:
            (aside / "config.json").write_text("new")
        assert (elsewhere / "config.json").read_text() == "precious"
        assert (tmp_path / "model" / "config.json").read_text() == "new"
