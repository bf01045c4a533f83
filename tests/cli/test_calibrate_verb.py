"""`twostroke calibrate` stores a profile that `plan` then stands on, and says when the machine is busy."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from twostroke.calibration import measure
from twostroke.cli.main import main
from twostroke.core.profile import load_profile


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(measure, "Extent", lambda: measure.SMALL)
    yield
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_the_profile_is_stored_and_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    code, out, err = run(capsys, "calibrate", "--device", "cpu", "--json")
    assert code == 0
    assert "busy" not in err
    assert "calibrating: 100%" in err
    record = json.loads(out)
    stored = load_profile()
    assert stored is not None
    assert record["fingerprint_key"] == stored.fingerprint.key
    assert record["path"].endswith(f"{stored.fingerprint.key}.json")
    assert run(capsys, "plan", "train", "nowhere")[2].startswith("error: nowhere does not exist")


def test_a_busy_machine_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 0.0, 0.0))
    code, out, err = run(capsys, "calibrate", "--device", "cpu")
    assert code == 0
    assert "64.0 of" in err
    assert "products" in out


def test_an_unknown_device_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "--device", "tpu")
    assert code == 2
    assert "Use cpu or cuda" in err
