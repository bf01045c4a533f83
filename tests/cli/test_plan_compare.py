"""`twostroke plan compare`: other layouts and datasheets, experts included; bounds by batch and context; bad layouts exit 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main

MIXTRAL_SMALL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL_SMALL))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "compare", *args])
    found = capsys.readouterr()
    return int(stopped.value.code or 0), found.out, found.err


def test_a_mixture_of_experts_over_several_devices(capsys: pytest.CaptureFixture[str], model: str) -> None:
    args = (model, "--hardware", "h100", "--train-layout", "data=4,zero=3,expert=4", "--serve-layout", "tensor=2", "--json")
    code, out, err = run(capsys, *args, "--scheme", "fp8", "--checkpointing", "full")
    assert code == 0, err
    found = json.loads(out)
    devices = next(row for row in found["rows"] if row["label"] == "devices")
    assert (devices["train"]["value"], devices["decode"]["value"]) == ("4: dp4 ep4 z3", "2: tp2")
    assert set(found["flips"]) == {"searched", "analytic", "attention"}
    by_context = [row["analytic"] for row in found["flips"]["attention"]["contexts"]]
    numbers = [batch for batch in by_context if batch is not None]
    assert numbers == sorted(numbers)  # the longer the context, the later
    assert by_context[-1] is None  # and at 32k never: reading the keys takes longer at any batch


def test_the_text_says_on_what_the_bound_depends(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out, _ = run(capsys, model, "--hardware", "l40s")
    assert code == 0
    assert "depends on component, batch and context" in out
    assert "a token passing 2 of 8 experts" in out
    assert max(len(line) for line in out.split("\n") if model not in line) <= 120


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--train-layout", "rows=2"), ("rows=2", "data, zero, tensor")),
        (("--train-layout", "data=two"), ("data=two",)),
        (("--train-layout", "tensor=3"), ("tensor=3", "must divide n_heads=16")),
        (("--serve-layout", "data=2"), ("data=2", "tensor, pipeline, expert")),
        (("--serve-layout", "tensor=0"), ("tensor=0", "at least 1")),
        (("--checkpointing", "some"), ("some", "none, selective, selective_op, full")),
    ],
)
def test_bad_layouts_are_a_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], model: str, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, _, err = run(capsys, model, "--hardware", "h100", *args)
    assert code == 2
    for word in words:
        assert word in err
