"""Every measured number of README.md and CHANGELOG.md is read from the committed run that it names, or is not there."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from machines import machine, small_llama
from twostroke.core.described import plain
from twostroke.planner.choosing.comparison import compare, merge_measured
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.shape import TrainingShape

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md")

UNIT = (
    r"(?:[kMGT]?i?B(?:/s)?|[µmn]?s|seconds?|min(?:utes?)?|h(?:ours?)?|%|×(?!\s?\d)|times|[kMGTP]?FLOP(?:/s)?|tok(?:ens)?/s|"
    r"tokens a second|requests/s|nats|bits per byte|points)"
)
NUMBER = re.compile(rf"(?<![\w.#-])(?:\d[\d,]*\.\d+|\d[\d,]*(?=\s?{UNIT}(?![\w-])))")
"""A number with a unit, or one with decimals."""

LIMITS: dict[str, tuple[str, str, float]] = {
    "90% interval": ("twostroke.planner.truth.intervals", "LEVEL", 0.01),
    "headers ends after 10 s": ("twostroke.server.connections", "HEADERS_TIMEOUT_S", 1.0),
    "reads nothing for 60 s": ("twostroke.server.connections", "SEND_TIMEOUT_S", 1.0),
    "at most 64 MiB each": ("twostroke.server.admission", "OUTGOING_BYTES", 2.0**20),
    "(256 MiB": ("twostroke.data.sandbox", "MEMORY_BYTES", 2.0**20),
    "2 s a text": ("twostroke.data.template_sandbox", "RENDER_S", 1.0),
    "(4 MiB": ("twostroke.core.documents", "MAX_DOCUMENT_BYTES", 2.0**20),
    "a recipe 256 KiB": ("twostroke.core.documents", "MAX_TOML_BYTES", 2.0**10),
}
"""Limits of the code that the pages name: the words, module and constant, and what the words' unit is in the constant's."""

VERSIONS = re.compile(
    r"Python 3\.\d+|\b\d+\.\d+\.\d+\b|h11>=[\d.]+|Apache-2\.0|OpenVINO \d+|`[^`]*`|\]\([^)]*\)|arXiv[: ][\d.]+"
)
"""Decimals that measure nothing."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("measured")


def prose(page: str) -> str:
    """A page without what is generated, code, links' addresses and versions."""
    page = re.sub(r"<!-- measured \w+ -->.*?<!-- /measured -->", "", page, flags=re.DOTALL)
    page = re.sub(r"<!-- tree -->.*?<!-- /tree -->", "", page, flags=re.DOTALL)
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return VERSIONS.sub("", page)


def untraced(page: str) -> list[str]:
    """Numbers of a page that look measured and are neither generated nor a limit of the code."""
    text = prose(page)
    for words in LIMITS:
        text = text.replace(words, "")
    return [match[0] for match in NUMBER.finditer(text)]


@pytest.mark.parametrize("name", PAGES)
def test_generated_numbers_are_those_of_the_runs(measured: ModuleType, name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert measured.MARK.search(page)
    assert measured.with_measured(page) == page, f"{name} is out of date: run `make docs`"


@pytest.mark.parametrize("name", PAGES)
def test_no_other_number_is_measured(name: str) -> None:
    assert untraced((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("words", LIMITS)
def test_limits_are_those_of_the_code(words: str) -> None:
    module, constant, factor = LIMITS[words]
    found = re.search(r"\d[\d,]*(?:\.\d+)?", words)
    assert found is not None
    value = getattr(importlib.import_module(module), constant)
    assert float(found[0].replace(",", "")) * factor == pytest.approx(value), words


@pytest.mark.parametrize("name", PAGES)
def test_changing_a_digit_of_any_block_is_seen(measured: ModuleType, name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    right = measured.with_measured(page)
    for block in measured.MARK.finditer(page):
        digit = re.search(r"\d", page[block.end(1) : block.start(3)])
        if digit is None:  # a block whose run is still to be made
            continue
        at = block.end(1) + digit.start()
        wrong = f"{page[:at]}{(int(digit[0]) + 1) % 10}{page[at + 1 :]}"
        assert measured.with_measured(wrong) == right != wrong


def test_a_number_that_changes_in_its_run_changes_on_the_page(
    measured: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("*.py", "*.jsonl", "*.csv"))
    before = measured.training()
    summary = tmp_path / "benchmarks" / measured.TRAINING_RUN / "summary.md"
    assert "| twostroke | 9,547 |" in summary.read_text()
    summary.write_text(summary.read_text().replace("| twostroke | 9,547 |", "| twostroke | 9,548 |"))
    monkeypatch.setattr(measured, "BENCHMARKS", tmp_path / "benchmarks")
    assert measured.training() == before.replace("9,547", "9,548")


@pytest.mark.parametrize(
    "sentence",
    [
        "int8 decodes 5.1 times as fast",
        "peaks at 2.4 GB",
        "1 ms, not 12",
        "ratio of 1.0012",
        "19 requests/s",
        "× 1.44",
        "at 41.9%",
    ],
)
def test_a_measured_number_in_prose_is_found(sentence: str) -> None:
    assert untraced(sentence)


@pytest.mark.parametrize(
    "sentence", ["Python 3.11", "two cores", "batch 16 × 512", "`--slo-ttft-ms 500`", "a vocabulary of 32,000"]
)
def test_what_measures_nothing_is_left_alone(sentence: str) -> None:
    assert not untraced(sentence)


def test_the_best_peer_is_named_and_losses_are_marked(measured: ModuleType) -> None:
    text = measured.inference()
    assert "behind" in text
    assert "a tie" in text
    for run in measured.INFERENCE_RUNS.values():
        for shape in measured.SHAPES:
            peers = [row for row in measured.tables(run)[shape] if not row["engine"].startswith("twostroke")]
            best = max(value for row in peers if (value := measured.number(row["decode 1"])) is not None)
            assert f"{measured.shown(best)} (" in text, (run, shape)


def test_what_fails_its_gate_is_said_and_not_quoted(measured: ModuleType) -> None:
    assert "**1.00120, fails**" in measured.quality()
    assert "kv8" not in measured.inference()


def test_a_demo_that_is_kept_becomes_a_table(measured: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the comparison that `twostroke demo` writes, by ``benchmarks/demo/run.py``, to the page."""
    spec, hardware = small_llama(), machine()
    load = ServingShape(scheme="int8", batch=4, prompt_tokens=64, output_tokens=64)
    comparison = merge_measured(
        compare(spec, TrainingShape(steps=10), load, hardware, "small"),
        {"forward_s": 0.125, "train_tok_per_s": 1234.0, "peak_memory_bytes": 2.0**30},
        {"tpot_s": 0.002, "decode_tok_per_s": 2000.0},
    )
    demo = tmp_path / "demo"
    demo.mkdir()
    (demo / "comparison.json").write_text(json.dumps(plain(comparison) | {"worked_s": 61.0}))
    (demo / "comparison.txt").write_text("as it was printed")
    kept = tmp_path / "benchmarks" / "demo" / "runs" / "2026-01-01-a-machine-abcdef0"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "demo" / "run.py", "--of", demo, "--out", kept], check=True, timeout=120
    )
    monkeypatch.setattr(measured, "BENCHMARKS", tmp_path / "benchmarks")
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    text = measured.demo()
    assert re.search(r"\| training, forward \| \S+ ms \| 125 ms \|", text)
    assert re.search(r"\| training, throughput \| \S+ tok/s \| 1\.23k tok/s \|", text)
    assert re.search(r"\| decode, latency \(TPOT\) \| \S+ (?:ms|µs) \| 2 ms \|", text)
    assert "1 min 1 s in all" in text
    assert kept.name in text


def test_without_a_committed_demo_the_page_has_no_table_of_one(
    measured: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "BENCHMARKS", tmp_path)
    assert measured.demo() == ""
    assert measured.with_measured("<!-- measured demo -->\nold\n<!-- /measured -->") == (
        "<!-- measured demo -->\n<!-- /measured -->"
    )


@pytest.mark.parametrize("words", LIMITS)
def test_every_limit_is_on_a_page(words: str) -> None:
    assert any(words in (ROOT / name).read_text(encoding="utf-8") for name in PAGES)
