"""The command line's frame: verbs are found, mistakes are sentences, planning never loads torch."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from twostroke.cli.main import VERBS, main


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "twostroke", *args], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_imports_without_torch(verb: str) -> None:
    code = (
        "import sys; from twostroke.cli.main import main\n"
        f"try: main([{verb!r}, '--help'])\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported for a help text'\n"
        "assert 'fastapi' not in sys.modules and 'plotly' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "--json" in result.stdout or "COMMAND" in result.stdout


def test_an_unknown_verb_exits_2_and_suggests_the_near_one() -> None:
    result = run("trian")
    assert result.returncode == 2
    assert "train" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_every_verb_with_what_it_is_for() -> None:
    result = run("--help")
    assert result.returncode == 0
    for verb in VERBS:
        assert verb in result.stdout


def test_an_input_error_is_one_sentence_and_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["train", "no-such-recipe.toml", "--json"])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert "no-such-recipe.toml" in json.loads(captured.out)["error"]
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


def test_verbs_and_files_agree() -> None:
    for verb in VERBS:
        assert importlib.util.find_spec(f"twostroke.cli.{verb}_verb"), verb


def test_ctrl_c_in_a_verb_is_a_sentence_and_exit_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("twostroke.planner.hardware.tables.load_hardware", stopped)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "train", "recipes/quick.toml", "--json"])
    found = capsys.readouterr()
    assert ended.value.code == 130
    assert json.loads(found.out) == {"error": "stopped by Ctrl-C."}
    assert found.err == "error: stopped by Ctrl-C.\n"


def test_the_list_of_verbs_cuts_no_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([])
    out, err = capsys.readouterr()
    listed = (out + err).partition("Commands:")[2]
    assert "..." not in listed
    for verb, sentence in VERBS.items():
        assert f"{verb}" in listed
        assert sentence in listed
