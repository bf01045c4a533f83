"""Models by their name on the Hub, without a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from twostroke.interop import hub


def test_a_log_gets_no_bars_of_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that is drawn again and again into a file is hundreds of lines."""
    were_disabled: list[bool] = []

    def snapshot(name: str, **options: Any) -> str:
        were_disabled.append(huggingface_hub.utils.are_progress_bars_disabled())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    huggingface_hub.utils.enable_progress_bars()
    try:
        assert hub.download("owner/model") == tmp_path
    finally:
        huggingface_hub.utils.enable_progress_bars()
    assert were_disabled == [True]
