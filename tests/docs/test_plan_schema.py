"""Documents of every plan are what the schema says, key by key; an undocumented key, a missing one or a wrong type fails."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from machines import profile
from plan_schema import DOCUMENTS, Schema, json_schema, markdown
from twostroke.cli.main import main
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.planner.truth.document import PLAN_SCHEMA

LLAMA = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip

COMMANDS = [
    ("train", "CONFIG"),
    ("train", "CONFIG", "--steps", "50", "--explain"),
    ("train", "MIXTRAL", "--steps", "50"),
    ("train", "RECIPE"),
    ("serve", "CONFIG"),
    ("serve", "MIXTRAL", "--explain"),
    ("serve", "CONFIG", "--scheme", "int8", "--batch", "3"),
    ("serve", "CONFIG", "--tensor", "2", "--rate", "3", "--slo-ttft-ms", "500", "--slo-tpot-ms", "30", "--disaggregate"),
    ("serve", "CONFIG", "--speculate", "4,0.8,0.05", "--prefix-hits", "0.5"),
    ("train", "CONFIG", "--tensor", "2", "--pipeline", "2", "--data-parallel", "4", "--zero", "1", "--steps", "9", "--explain"),
    ("train", "CONFIG", "--method", "qlora", "--zero", "3", "--data-parallel", "4"),
    ("compare", "CONFIG"),
    ("compare", "CONFIG", "--steps", "9", "--explain"),
    ("crossover", "CONFIG", "--requests-per-day", "1e6", "--tokens", "1e9"),
    ("crossover", "CONFIG", "--requests-per-day", "1e6", "--tokens", "1e9", "--always-on", "--api", "gpt-4o"),
    ("crossover", "CONFIG", "--requests-per-day", "10", "--training-usd", "1e6", "--usd-per-request", "0.001", "--explain"),
    ("search", "CONFIG"),
    ("search", "MIXTRAL", "--phase", "serve", "--slo-tpot-ms", "20", "--max-devices", "4", "--no-simulation"),
]


class Mismatch(Exception):
    pass


def validate(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> None:
    """The part of JSON Schema that the description uses; raises Mismatch with the path of what is wrong."""
    if "$ref" in schema:
        return validate(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, path)
    if "anyOf" in schema:
        failures = []
        for option in schema["anyOf"]:
            try:
                return validate(value, option, root, path)
            except Mismatch as failure:
                failures.append(str(failure))
        # The option that went deepest is the one that was meant.
        raise Mismatch(max(failures, key=lambda text: text.partition(" ")[0].count(".")))
    if "enum" in schema and value not in schema["enum"]:
        raise Mismatch(f"{path}: {value!r} is not among {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        raise Mismatch(f"{path}: {value!r} is not {schema['const']!r}")
    kind = schema.get("type")
    fits = {
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    if kind and not fits[kind]:
        raise Mismatch(f"{path}: {value!r} is no {kind}")
    if kind == "array":
        for i, item in enumerate(value):
            validate(item, schema["items"], root, f"{path}[{i}]")
    if kind == "object":
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key in schema.get("required", ()):
            if key not in value:
                raise Mismatch(f"{path}.{key} is missing")
        for key, item in value.items():
            if key in properties:
                validate(item, properties[key], root, f"{path}.{key}")
            elif others is False:
                raise Mismatch(f"{path}.{key} is not documented")
            else:
                validate(item, others, root, f"{path}.{key}")
    return None


def validate_plan(document: dict[str, Any]) -> None:
    root = json_schema()
    validate(document, root["$defs"][f"plan_{document['kind']}"], root)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {
        "CONFIG": json.dumps(LLAMA),
        "MIXTRAL": json.dumps(MIXTRAL),
        "RECIPE": 'output = "runs/x"\n[model]\nsize = "auto"\n[train]\nbudget_s = 300\n',
    }
    paths = {"CONFIG": tmp_path / "config.json", "MIXTRAL": tmp_path / "mixtral.json", "RECIPE": tmp_path / "demo.toml"}
    for name, path in paths.items():
        path.write_text(texts[name])
    return {name: str(path) for name, path in paths.items()}


def planned(capsys: pytest.CaptureFixture[str], files: dict[str, str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *(files.get(argument, argument) for argument in arguments), "--json"])
    output = capsys.readouterr()
    assert stopped.value.code == 0, output.err + output.out
    found: dict[str, Any] = json.loads(output.out)
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
def test_documents_of_every_plan_fit_the_schema(
    command: tuple[str, ...], files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = () if "--hardware" in command else ("--hardware", "h100-sxm")
    document = planned(capsys, files, *command, *hardware)
    assert document["schema"] == PLAN_SCHEMA
    assert document["kind"] == command[0]
    assert bool(document.get("terms")) == ("--explain" in command)
    validate_plan(document)


@pytest.mark.parametrize("kind", ["train", "serve", "compare"])
def test_documents_for_a_calibrated_machine_fit_too(
    kind: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    import dataclasses

    save_profile(dataclasses.replace(profile(), fingerprint=read_fingerprint()))
    validate_plan(planned(capsys, files, kind, "CONFIG"))


def test_undocumented_missing_and_mistyped_keys_are_noticed(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, files, "serve", "CONFIG", "--hardware", "h100-sxm")

    def complaint(change: Any) -> str:
        changed = copy.deepcopy(document)
        change(changed)
        with pytest.raises(Mismatch) as caught:
            validate_plan(changed)
        return str(caught.value)

    assert complaint(lambda d: d["prediction"].update(speed=1.0)) == ".prediction.speed is not documented"
    assert complaint(lambda d: d["shape"].pop("batch")) == ".shape.batch is missing"
    assert "is no integer" in complaint(lambda d: d.update(pages="many"))
    assert "twostroke.plan/1" in complaint(lambda d: d.update(schema="twostroke.plan/2"))


def test_every_key_of_every_object_says_what_it_is() -> None:
    root = json_schema()
    assert len(root["$defs"]) >= len(DOCUMENTS) + 40
    for name, schema in root["$defs"].items():
        assert schema["description"], name
        for key, described in schema["properties"].items():
            assert described.get("description") or "const" in described, f"{name}.{key}"


def test_types_are_written_as_the_page_says() -> None:
    schema = Schema()
    integers = {"type": "array", "items": {"type": "integer"}}
    assert schema.of(tuple[int, ...] | None) == ("[integer]?", {"anyOf": [integers, {"type": "null"}]})
    assert schema.of(float | str | None)[0] == "number or text or null"
    assert schema.of(dict[str, Any]) == ("{any}", {"type": "object", "additionalProperties": {}})
    with pytest.raises(TypeError, match="describes no key"):
        schema.of(Path)


def test_units_are_told_apart_from_what_they_measure() -> None:
    step = json_schema()["$defs"]["training_prediction"]["properties"]["step_time_s"]
    assert step == {"type": "number", "description": "s of one update", "unit": "s"}
    assert "| `step_time_s` | number | s of one update |" in markdown()


def test_every_object_is_used_by_some_document() -> None:
    root = json_schema()
    seen: set[str] = set()

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            if "$ref" in part:
                name = part["$ref"].rpartition("/")[2]
                if name not in seen:
                    seen.add(name)
                    walk(root["$defs"][name])
            for value in part.values():
                walk(value)
        elif isinstance(part, list):
            for value in part:
                walk(value)

    walk(root["anyOf"])
    assert set(root["$defs"]) == seen
