"""Options of several models and of an A/B test, and what is compared afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from twostroke.cli import ab_verb
from twostroke.cli.model_options import several
from twostroke.cli.serve_verb import app as serve_app
from twostroke.core.errors import ConfigError


def lines(n_clients: int) -> str:
    found = []
    for i in range(n_clients * 3):
        arm = "ab"[i % n_clients % 2]
        found.append({
            "time": 10.0 * i, "id": f"x-{i}", "key": None, "model": "a", "outcome": "complete", "prompt_tokens": 4,
            "cached_tokens": 0, "completion_tokens": 8, "finish_reasons": {"length": 1}, "ttft_s": 0.1, "e2e_s": 1.0,
            "arm": arm, "unit": f"u{i % n_clients}", "share": 0.5,
        })  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in found)


def run(*words: str) -> Any:
    return CliRunner().invoke(ab_verb.app, list(words))


def test_a_log_is_compared_in_lines_as_a_document_and_as_a_page(tmp_path: Path) -> None:
    log, page = tmp_path / "usage.jsonl", tmp_path / "ab.html"
    log.write_text(lines(40))
    found = run(str(log), "--usd-per-hour", "3.6", "--out", str(page), "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert (document["a"]["name"], document["b"]["clients"]) == ("a", 20)
    cost = next(row for row in document["rows"] if row["unit"] == "usd")
    # One request at a time: a second for 8 tokens, at a thousandth of a dollar a second.
    assert cost["a"]["value"] == pytest.approx(1e-3 / 8 * 1e6)
    assert document["report"] == str(page)
    assert "<html" in page.read_text()
    assert "not told from noise" in run(str(log)).stdout


def test_impossible_options_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    log.write_text(lines(4))
    for words, why in (
        (("--arm", "a"), "given 1 times"),
        (("--arm", "a", "--arm", "z"), "'z' is not in the log"),
        (("--usd-per-hour", "-1"), "at least 0"),
    ):
        found = run(str(log), *words)
        assert why in str(found.exception), words
    assert "cannot be read" in str(run(str(tmp_path / "none")).exception)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": ["x"]}, "must be NAME=DIR"),
        ({"model": ["x={0}"]}, "go together"),
        ({"memory_gib": 1.0}, "go together"),
        ({"model": ["m={0}"], "memory_gib": 1.0}, "its own name"),
        ({"model": ["x={0}", "x={0}"], "memory_gib": 1.0}, "its own name"),
        ({"model": ["x={0}"], "memory_gib": -1.0}, "above 0"),
        ({"model": ["x={0}"], "memory_gib": 1.0, "ab": "x"}, "NAME=SHARE"),
        ({"model": ["x={0}"], "memory_gib": 1.0, "ab": "x=1"}, "above 0 and below 1"),
        ({"model": ["x={0}"], "memory_gib": 1.0, "ab": "y=0.5"}, "'y' is not served"),
        ({"model": ["x={0}"], "memory_gib": 1.0, "lora": ["p@z=/tmp"]}, "'z' is not served"),
    ],
)
def test_models_that_do_not_go_together_are_refused(model: Path, given: dict[str, Any], why: str) -> None:
    given = {name: [each.format(model) for each in v] if isinstance(v, list) else v for name, v in given.items()}
    options: dict[str, Any] = {"model": [], "memory_gib": 0.0, "wait_s": 60.0, "ab": "", "lora": []} | given
    with pytest.raises(ConfigError, match=why):
        several(**options, names=("m",))


def test_adapters_belong_to_the_model_behind_their_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    found = several([f"x={model}"], 1.0, 60.0, "", [f"p={tmp_path}", f"q@x={tmp_path}", f"r@m={tmp_path}"], ("m",))
    assert {owner: sorted(own) for owner, own in found.of_model.items()} == {"": ["p", "r"], "x": ["q"]}
    with pytest.raises(ConfigError, match="another adapter"):
        several([f"x={model}"], 1.0, 60.0, "", [f"p={tmp_path}", f"p@x={tmp_path}"], ("m",))


@pytest.mark.parametrize(
    "other",
    [
        ("--replicas", "2"),
        ("--admin",),
        ("--files-dir", "f"),
        ("--response-cache", "c"),
        ("--mode", "throughput"),
        ("--kv-events", "http"),
    ],
)
def test_what_several_models_cannot_have_yet_is_refused_by_name(model: Path, tmp_path: Path, other: tuple[str, ...]) -> None:
    words = [str(model), "--model", f"x={model}", "--models-memory-gib", "2", "--port", "0", *other]
    found = CliRunner().invoke(serve_app, words)
    assert other[0] in str(found.exception), found.exception


def test_an_ab_test_needs_a_usage_log(model: Path) -> None:
    words = [str(model), "--model", f"x={model}", "--models-memory-gib", "2", "--ab", "x=0.5", "--port", "0"]
    assert "--usage-log" in str(CliRunner().invoke(serve_app, words).exception)


def test_a_model_that_the_memory_never_holds_is_refused(model: Path) -> None:
    words = [str(model), "--model", f"x={model}", "--models-memory-gib", "0.01", "--port", "0"]
    assert "does not hold model" in str(CliRunner().invoke(serve_app, words).exception)
