"""What benchmarks record of a run names no folder of the machine, in runs to come and in those that are committed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from scripts import BENCHMARKS, script

recorded = script("recorded.py")
ROOT = BENCHMARKS.parent


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/home/me/models/smollm-135m", "FOLDER/smollm-135m"),
        ("/home/me/models/smollm-135m/", "FOLDER/smollm-135m"),
        ("--out=/tmp/run-3", "--out=FOLDER/run-3"),
        ("litgpt=/opt/peers/litgpt", "litgpt=FOLDER/litgpt"),
        ("draft:/tmp/small", "draft:FOLDER/small"),
        ("/a/b.txt,/c/d.txt", "FOLDER/b.txt,FOLDER/d.txt"),
        ("cannot open '/tmp/peers/vllm': it is absent", "cannot open 'FOLDER/vllm': it is absent"),
        ("profile    /tmp/x/profiles/0f.json\nreads 208 GB/s", "profile    FOLDER/0f.json\nreads 208 GB/s"),
        (f"{ROOT}/recipes/lora.toml", "recipes/lora.toml"),
        (f"--out={ROOT}/benchmarks/beams/runs/today", "--out=benchmarks/beams/runs/today"),
    ],
)
def test_a_folder_of_the_machine_is_left_out_and_one_of_the_repository_is_relative(typed: str, expected: str) -> None:
    assert recorded.without_folders(typed) == expected


@pytest.mark.parametrize(
    "word",
    [
        "recipes/lora.toml", "runs/quick", "../elsewhere", "--out=runs/quick", "meta-llama/Llama-3.1-8B", "http://127.0.0.1:8000/v1",
        "--url=https://example.org/a/b", "^serve/(llama-384|http)/", "^train/(q?lora)", "1e+09", "tok/s",
    ],
)  # fmt: skip
def test_a_relative_path_a_name_on_the_hub_a_url_and_a_pattern_stay_as_they_are(word: str) -> None:
    assert recorded.without_folders(word) == word


def test_a_command_can_be_typed_in_the_repository_wherever_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--only", "bf16, cache", "--pattern", "^(serve|http)/", "--out"]
    monkeypatch.chdir(BENCHMARKS / "beams")
    monkeypatch.setattr(sys, "argv", ["run.py", *words, str(tmp_path / "run")])
    assert shlex.split(recorded.command()) == ["python", "benchmarks/beams/run.py", *words, "FOLDER/run"]


def test_files_of_a_run_are_text_as_it_is_and_else_json(tmp_path: Path) -> None:
    recorded.write(tmp_path / "run", {"summary.md": "2 × faster\n", "raw.json": {"ratio": 2.0, "what": "2 × 2"}})
    assert (tmp_path / "run" / "summary.md").read_text(encoding="utf-8") == "2 × faster\n"
    assert json.loads((tmp_path / "run" / "raw.json").read_text(encoding="utf-8")) == {"ratio": 2.0, "what": "2 × 2"}


def test_every_benchmark_that_writes_a_run_records_its_command_by_the_one_helper() -> None:
    takes_out = [path for path in BENCHMARKS.rglob("*.py") if '("--out"' in path.read_text(encoding="utf-8")]
    engines = BENCHMARKS / "inference" / "engines"  # processes of inference/run.py, which records the command
    scripts = [path for path in takes_out if engines not in path.parents]
    assert len(scripts) > 30
    helper = re.compile(r"recorded\.(command|conditions)\(\)|\bdescribe\(args\.out")  # ``describe`` is of serving/run.py
    other = re.compile(r"\.join\([^\n]*sys\.argv|\"command\": (?!recorded\.|command\b)|python benchmarks/[^\n]*\\n")
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert helper.search(text), f"{path.relative_to(ROOT)} writes a run without `recorded.command()`"
        assert not other.search(text), f"{path.relative_to(ROOT)} makes a command of its own"


def test_committed_runs_name_no_folder_of_a_machine() -> None:
    folder = re.compile(r"(?:(?<![\w./])|(?<=\\n))/(tmp|root|home|work|mnt|srv|opt|Users|private|var/tmp)/[^\s\"']*")
    kinds = {".json", ".jsonl", ".txt", ".md", ".csv"}
    read = {path: path.read_text(encoding="utf-8") for path in BENCHMARKS.rglob("*.*") if path.suffix in kinds}
    assert len(read) > 200
    assert not {str(path.relative_to(ROOT)): found[0] for path, text in read.items() if (found := folder.search(text))}
