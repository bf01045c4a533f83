"""`twostroke calibrate` stores a profile that `plan` then stands on, and says when the machine is busy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from twostroke.calibration import measure
from twostroke.calibration.timing import Clock
from twostroke.cli.calibrate_verb import WIDTH, busy_text
from twostroke.cli.main import main
from twostroke.core.contention import low_by
from twostroke.core.profile import load_profile
from twostroke.core.rates import Conditions


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


def others_use(cores: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(used=cores, processors=frozenset({0, 1}))
    monkeypatch.setattr("twostroke.cli.calibrate_verb.recently", lambda: found)


def test_the_profile_is_stored_and_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    others_use(0.0, monkeypatch)
    code, out, err = run(capsys, "calibrate", "--device", "cpu", "--json")
    assert code == 0
    assert "busy" not in err
    assert err.startswith("calibrating ...\n")
    record = json.loads(out)
    stored = load_profile()
    assert stored is not None
    assert record["fingerprint_key"] == stored.fingerprint.key
    assert record["path"].endswith(f"{stored.fingerprint.key}.json")
    assert run(capsys, "plan", "train", "nowhere")[2].startswith("error: nowhere does not exist")


def test_a_busy_machine_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    others_use(64.0, monkeypatch)
    code, out, err = run(capsys, "calibrate", "--device", "cpu")
    assert code == 0
    assert "64.0 of" in err
    assert "products" in out
    *rows, path = out.rstrip("\n").split("\n")
    assert path.startswith("profile")
    assert max(map(len, rows)) <= WIDTH  # a table, not a wall of text


def test_how_low_the_numbers_may_read_is_said() -> None:
    assert busy_text(Conditions(0.05, {"train": 0.0, "serve": 0.0})) == ""
    said = busy_text(Conditions(0.42, {"train": 0.31, "serve": 0.2}))
    assert "42% of the measurements" in said
    assert "31% low on average" in said


def test_measurements_without_a_quiet_moment_are_counted_by_how_long_they_waited() -> None:
    clock = Clock("cpu")
    for shares in ([0.5, 0.001], [0.3, 0.2], [0.6, 0.8]):
        clock.count(shares)
    assert clock.waited_shares == [0.0, 0.2, 0.6]
    assert clock.disturbed_share == pytest.approx(2 / 3)
    n = torch.get_num_threads()
    assert clock.low_by_share == pytest.approx((low_by(0.2, 1.0, n) + low_by(0.6, 1.0, n)) / 3)


@pytest.mark.parametrize(("option", "remedy"), [("--device", "Use cpu or cuda"), ("--only", "Use one of train, serve")])
def test_an_unknown_name_is_refused_before_the_machine_is_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, remedy: str
) -> None:
    others_use(64.0, monkeypatch)
    code, _, err = run(capsys, "calibrate", option, "tpu")
    assert code == 2
    assert remedy in err
    assert "busy" not in err


def test_an_endless_number_of_ranks_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "--ranks", "100000000000")
    assert code == 2
    assert "--ranks 100000000000 is not in the range 0<=x<=1024." in err
