"""``twostroke exits`` fits and writes; ``generate --early-exit`` reads it, and refuses what it does not go with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real_model import make_model
from twostroke.cli.main import main
from twostroke.core.fitted_exits import FITTED_EXITS, read_fitted_exits
from twostroke.kernels.native_library import library, why_absent

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())

SOURCES = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([*args])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(caught.value.code or 0), out, err


def test_what_was_fitted_is_what_generate_takes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", str(model), "--prompt", "a", "--early-exit", "auto")
    assert code == 2
    assert "twostroke exits" in err
    data = str(SOURCES / "cli" / "test_generate_verb.py")
    code, out, err = run(capsys, "exits", str(model), "--data", data, "--dtype", "fp32", "--most-changed", "0.5", "--json")
    assert code == 0, err
    document = json.loads(out)["exits"]
    fitted = read_fitted_exits(model)
    assert document["threshold"] == fitted.threshold
    assert document["most_changed"] == fitted.most_changed == 0.5
    assert fitted.changed <= 0.5
    args = ("--prompt", "def main(", "--max-tokens", "20", "--temperature", "0", "--ignore-eos", "--dtype", "fp32", "--json")
    code, out, err = run(capsys, "generate", str(model), *args, "--early-exit", "auto")
    assert code == 0, err
    assert "every token passed all layers" in err
    assert "exits    19 tokens" in err
    exits = json.loads(out)["exits"]
    assert sum(exits.values()) == 19
    assert [*map(int, exits)][:-1] == [*fitted.layers]
    code, _, err = run(capsys, "generate", str(model), *args[:-1], "--early-exit", "auto", "--dtype", "int8")
    assert code == 2
    assert "held as fp32, not int8" in err
    (model / FITTED_EXITS).unlink()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--early-exit", "maybe"), "--early-exit maybe is not known"),
        (("--early-exit", "at:7"), "--early-exit at:7 is not known"),
        (("--early-exit", "at:0.5", "--speculate", "ngram"), "does not go with --speculate ngram"),
        (("--early-exit", "at:0.5", "--deterministic"), "does not go with deterministic"),
        (("--early-exit", "at:0.5", "--beams", "2"), "beam search"),
    ],
)
def test_generate_refuses_by_name(model: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str) -> None:
    code, _, err = run(capsys, "generate", str(model), "--prompt", "a", *args)
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--most-changed", "0"), "must be a share"),
        (("--most-changed", "nan"), "must be a share"),
        (("--confidence", "1"), "must be a share"),
        (("--layers", "0"), "exits after layers 0"),
        (("--layers", "99"), "exits after layers 99"),
        (("--layers", "2", "--layers", "1"), "exits after layers 2, 1"),
        (("--data", "/does/not/exist"), "/does/not/exist"),
        ((), "names no held-out text"),
    ],
)
def test_exits_refuses_what_cannot_be(
    model: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str
) -> None:
    code, _, err = run(capsys, "exits", str(model), *args)
    assert code == 2
    assert said in err
    assert not (model / FITTED_EXITS).exists()
