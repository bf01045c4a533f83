"""A model card in Hugging Face's layout, of what was recorded here: every number names the run that measured it.

What no run has measured is left out, and a line says which command would measure it. Numbers are of the weights as they lie
there: runs that ended before these were written do not count.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.documents import is_number, read_object
from twostroke.core.errors import CorruptFileError
from twostroke.core.families import read_config, read_spec
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes, format_count, format_money, format_parameters, format_seconds
from twostroke.ledger.store import Ledger, Run
from twostroke.ledger.text import format_value
from twostroke.model.published.registry import directory_holding
from twostroke.planner.work.params import count_parameters

ADAPTERS = "adapter_config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE = re.compile(r"^license:[ \t]*([A-Za-z0-9][A-Za-z0-9.\-]{0,60})[ \t]*$", re.MULTILINE)
_README_BYTES = 64 * 1024

SPEEDS = {
    "prefill_tok_per_s": "prompt",
    "decode_tok_per_s": "decoding",
    "output_tok_per_s": "output, prompts included",
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "startup_s": "start, the first time",
    "warm_startup_s": "start, later",
    "peak_memory_bytes": "peak memory",
}
"""Measurements of runs of a model, by their names in the ledger, in words."""


@dataclass(frozen=True)
class Fact:
    """One number of a card: what it is of, as people read it, and where it comes from, a run's id or a file."""

    what: str
    value: str
    source: str


@dataclass(frozen=True)
class ModelCard:
    """``front`` is the YAML at the top, one value or several a key; ``sections`` hold facts by title; ``missing`` are lines
    about what was never measured."""

    name: str
    summary: str
    front: Mapping[str, str | tuple[str, ...]]
    sections: Mapping[str, tuple[Fact, ...]]
    missing: tuple[str, ...]

    def text(self) -> str:
        """The README.md."""
        lines = ["---"]
        for key, value in self.front.items():
            lines += [f"{key}: {value}"] if isinstance(value, str) else [f"{key}:", *(f"- {one}" for one in value)]
        lines += ["---", "", f"# {_cell(self.name)}", "", _cell(self.summary)]
        for title, facts in self.sections.items():
            if facts:
                lines += ["", f"## {title}", "", "| | | from |", "|---|---|---|"]
                lines += [f"| {_cell(f.what)} | {_cell(f.value)} | {_cell(f.source)} |" for f in facts]
        if self.missing:
            lines += ["", "## Not known", "", *(f"- {line}" for line in self.missing)]
        lines += ["", "## How to run it", "", "```", *_commands(self.name), "```", ""]
        return "\n".join(lines).encode("utf-8", "replace").decode()


def model_card(directory: Path, ledger: Ledger) -> ModelCard:
    """The card of the model in ``directory``. Raises what ``read_spec`` does, and CorruptFileError for a damaged ledger."""
    spec, config = read_spec(directory), read_config(directory)
    record = _Record(directory, ledger)
    card = _Card(directory, spec, record)
    base = record.base(config)
    sections = {
        "Architecture": tuple(card.architecture()),
        "Training": tuple(card.training()),
        "Quality": tuple(card.quality()),
        "Quantisation": tuple(card.quantisation()),
        "Speed and memory": tuple(card.speed()),
        "Energy and cost of training": tuple(card.spent()),
    }
    front = _front(directory, base, card.quantised)
    return ModelCard(record.name, card.summary(base), front, sections, tuple(card.missing))


class _Record:
    """What is known about ``directory``: its training run's files and its runs in the ledger, the newest first."""

    def __init__(self, directory: Path, ledger: Ledger) -> None:
        self.directory = directory.resolve()
        self.name = _name(self.directory)
        self.runs = [run for run in ledger.runs() if self._is_of_these_weights(run)]
        # What a quantised copy learned, its source did.
        self.learned = self.directory if self.quantised is None else Path(str(self.quantised.inputs["model"]))
        of_run = _of_run(self.learned)
        self.recipe = _read(self.learned.parent / "recipe.json") if of_run else {}
        self.summary = _read(self.learned.parent / "summary.json") if of_run else {}
        trained = str(self.summary.get("run_id", ""))
        self.trained = next((run for run in ledger.runs("train") if run.run_id == trained), None)

    def _is_of_these_weights(self, run: Run) -> bool:
        named = run.inputs.get("directory") or run.inputs.get("model")
        if not isinstance(named, str) or Path(named) != self.directory or not run.measurements:
            return False
        return run.measurements[-1].measured_at >= _written_at(self.directory)

    def of_kind(self, *kinds: str) -> list[Run]:
        return [run for run in self.runs if run.kind in kinds]

    @property
    def quantised(self) -> Run | None:
        """The run that wrote it."""
        return next(iter(self.of_kind("quantize")), None)

    def base(self, config: Mapping[str, Any]) -> tuple[str, str]:
        """(name of the model that it was made from, how), empty where it has none."""
        if (self.directory / ADAPTERS).is_file():
            return _usable(_read(self.directory / ADAPTERS).get("base_model_name_or_path")), "adapter"
        if self.quantised is not None:
            return str(self.learned), "quantized"
        if config.get("quantization_config"):
            return _usable(config.get("_name_or_path")), "quantized"
        model = self.recipe.get("model")
        started = model.get("init_from") if isinstance(model, dict) else None
        return _usable(started), "finetune"


class _Card:
    def __init__(self, directory: Path, spec: ModelSpec, record: _Record) -> None:
        self.directory, self.spec, self.record = directory, spec, record
        self.parameters = count_parameters(spec)
        self.missing: list[str] = []
        found = directory_holding(directory, spec)
        self.quantised = "" if found is None else "; ".join(found.labels)

    def summary(self, base: tuple[str, str]) -> str:
        name, how = base
        made = {"adapter": "Adapters of", "quantized": "A quantised copy of", "finetune": "Fine-tuned from"}[how]
        of = f" {made} {_short(name)}." if name else ""
        trained = " Trained from scratch." if self.record.recipe.get("method") == "pretrain" and not name else ""
        return f"A {self.spec.family} model of {format_parameters(self.parameters.total)} parameters.{trained}{of}"

    def architecture(self) -> list[Fact]:
        spec, count, config = self.spec, self.parameters, "config.json"
        facts = [
            Fact("family", spec.family, config),
            Fact("parameters", f"{count.total:,}", config),
            Fact("layers × width", f"{spec.n_layers} × {spec.d_model}", config),
            Fact("heads, of keys and values", f"{spec.n_heads}, {spec.n_kv_heads}", config),
            Fact("vocabulary", f"{spec.vocab_size:,}", config),
            Fact("longest context", f"{spec.max_positions:,} tokens", config),
        ]
        if count.active != count.total:
            facts.insert(2, Fact("parameters that a token passes", f"{count.active:,}", config))
        n_bytes = sum(file.stat().st_size for file in self.directory.glob("*.safetensors"))
        return [*facts, Fact("weights on disk", format_bytes(n_bytes), "the files")]

    def training(self) -> list[Fact]:
        summary, recipe = self.record.summary, self.record.recipe
        if not summary:
            self.missing.append("Training: these weights belong to no finished run here. `twostroke train RECIPE` records one.")
            return []
        run, measured = str(summary.get("run_id") or "summary.json"), _object(summary, "measurement")
        train, data = _object(recipe, "train"), _object(recipe, "data")
        sources = data.get("sources")
        names = ", ".join(filter(None, (_short(_usable(one)) for one in sources))) if isinstance(sources, list) else ""
        facts = [
            *([Fact("of", _short(str(self.record.learned)), run)] if self.record.quantised is not None else []),
            Fact("method", str(recipe.get("method", "")), "recipe.json"),
            Fact("text", names, "recipe.json"),
            Fact("steps", f"{summary.get('steps')} of {train.get('batch_size')} × {train.get('sequence_length')} tokens", run),
            Fact("optimizer", f"{train.get('optimizer')}, {train.get('dtype')}", "recipe.json"),
            *_numbers(summary, {"tokens": "tokens", "epochs": "epochs", "final_loss": "last loss, nats a token"}, run),
            *_numbers(measured, _HELD_OUT | _OF_TRAINING, run),
        ]
        if summary.get("n_trained_parameters") != summary.get("n_parameters"):
            facts += _numbers(summary, {"n_trained_parameters": "parameters trained"}, run)
        if isinstance(summary.get("weights_sha256"), str):
            facts.append(Fact("SHA-256 of the weights", summary["weights_sha256"], run))
        if not _HELD_OUT.keys() & measured.keys():
            self.missing.append("Quality on held-out text. `twostroke eval MODEL` measures it.")
        return facts

    def quality(self) -> list[Fact]:
        facts: list[Fact] = []
        seen: set[tuple[Any, ...]] = set()
        for run in self.record.of_kind("evaluate"):
            of = str(run.inputs.get("text") or "tasks")
            key = (of, *(str(task) for task in run.inputs.get("tasks") or ()))
            if key in seen:
                continue
            seen.add(key)
            how = f"{run.inputs.get('engine')}, {run.inputs.get('dtype')}"
            names = {name: name.replace("_", " ") for name in run.measurement if name not in _ABOUT_EVALUATION}
            found = _numbers(run.measurement, names, run.run_id)
            facts += [Fact(f"{fact.what} ({_short(of)}; {how})", fact.value, fact.source) for fact in found]
        if not facts and not self.record.summary:
            self.missing.append("Quality. `twostroke eval MODEL --data TEXT` or `--task NAME` measures it.")
        return facts

    def quantisation(self) -> list[Fact]:
        if not self.quantised:
            return []
        facts, run = [Fact("format", self.quantised, "config.json")], self.record.quantised
        if run is not None:
            facts += [Fact(key, str(run.inputs[key]), run.run_id) for key in ("scheme", "rounding") if run.inputs.get(key)]
            names = {"kl_nats": "KL to its source, nats a token", "perplexity_ratio": "perplexity ÷ its source's"}
            facts += _numbers(run.measurement, names, run.run_id)
        if run is None or "kl_nats" not in run.measurement:
            self.missing.append("What quantising cost in quality. `twostroke compare SOURCE MODEL --data TEXT` measures it.")
        return facts

    def speed(self) -> list[Fact]:
        facts: list[Fact] = []
        seen: set[str] = set()
        for run in self.record.of_kind("bench", "generate"):
            values = [
                f"{words} {format_value(name, run.measurement[name])}"
                for name, words in SPEEDS.items()
                if is_number(run.measurement.get(name))
            ]
            what = _conditions(run)
            if values and what not in seen:
                seen.add(what)
                facts.append(Fact(what, "; ".join(values), run.run_id))
        if not facts:
            commands = "`twostroke bench offline MODEL` and `twostroke bench serve MODEL`"
            self.missing.append(f"Speed and memory. {commands} measure them.")
        return facts

    def spent(self) -> list[Fact]:
        measured, run = _object(self.record.summary, "measurement"), self.record.trained
        source = str(self.record.summary.get("run_id") or "summary.json")
        if not measured:
            return []
        facts, seconds, usd = [], measured.get("train_time_s"), measured.get("cost_usd")
        if is_number(measured.get("energy_kwh")):
            facts.append(Fact("energy", format_value("energy_kwh", measured["energy_kwh"]), f"{source}: the devices' counters"))
        else:
            reasons = {} if run is None else _object(run.measurement, "not_measured")
            why = str(reasons.get("energy_kwh") or "no counter was read.")
            planned = _object(self.record.summary, "prediction").get("energy_kwh")
            if is_number(planned):
                how = f"{source}: predicted by the plan before the run, not measured"
                facts.append(Fact("energy", format_value("energy_kwh", planned), how))
            self.missing.append(f"Measured energy of training: {why}")
        if is_number(usd) and is_number(seconds) and seconds > 0:
            price = format_money(usd / seconds * 3600)
            facts.append(Fact("cost", format_money(usd), f"{source}: {format_seconds(seconds)} measured, at {price} an hour"))
        else:
            self.missing.append("Cost of training: the machine has no price. `twostroke calibrate` gives it one.")
        return facts


_HELD_OUT = {
    "heldout_bits_per_byte": "held-out text, bits per byte",
    "xz_bits_per_byte": "the same text by xz -9, bits per byte",
    "heldout_answer_nats_per_token": "held-out answers, nats a token",
}
_OF_TRAINING = {
    "train_time_s": "time",
    "train_tok_per_s": "speed",
    "peak_memory_bytes": "peak memory",
}
_ABOUT_EVALUATION = (
    "elapsed_s", "n_bytes", "n_tokens", "context", "stride", "not_measured", "waited_share", "scored_tok_per_s", "cost_usd",
    "model_bytes", "prefill_tok_per_s", "decode_tok_per_s",
)  # fmt: skip
_CONDITIONS = {
    "batch": "batch {}",
    "users": "{} users",
    "request_rate": "{} requests a second",
    "prompt_tokens": "{} prompt tokens",
    "output_tokens": "{} output tokens",
}
"""Inputs of a run that its speed depends on."""


def _conditions(run: Run) -> str:
    """What a run of the engine did, and where."""
    how = run.kind if run.kind == "generate" else "bench serve" if run.subject.endswith("over HTTP") else "bench offline"
    held = run.inputs.get("scheme") or run.inputs.get("dtype")
    asked = [words.format(_range(run.inputs[key])) for key, words in _CONDITIONS.items() if run.inputs.get(key)]
    machine = run.inputs.get("device") or f"machine {run.fingerprint}"
    return ", ".join([how, *([f"{held} weights"] if held and held != "auto" else []), *asked, str(machine)])


def _range(value: Any) -> str:
    """``[64, 64]`` → ``64``, ``[32, 128]`` → ``32 to 128``."""
    if isinstance(value, list):
        return " to ".join(str(one) for one in dict.fromkeys(value))
    return str(value)


def _front(directory: Path, base: tuple[str, str], quantised: str) -> dict[str, str | tuple[str, ...]]:
    front: dict[str, str | tuple[str, ...]] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    name, how = base
    if how == "adapter":
        front["library_name"] = "peft"
    license_name = _license(directory) or (_license(Path(name)) if name and Path(name).is_dir() else "")
    if license_name:
        front["license"] = license_name
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        front |= {"base_model": name, "base_model_relation": how}
    tags = ["twostroke", *(["quantized"] if quantised else []), *(["lora"] if how == "adapter" else [])]
    return front | {"tags": tuple(tags)}


def _license(directory: Path) -> str:
    """The license that the front of a README.md there names."""
    try:
        with (directory / "README.md").open(encoding="utf-8", errors="replace") as file:
            text = file.read(_README_BYTES)
    except OSError:
        return ""
    front = text.split("---", 2)[1] if text.startswith("---") and text.count("---") > 1 else ""
    found = _LICENSE.search(front)
    return found.group(1) if found else ""


def _commands(name: str) -> list[str]:
    quoted = _cell(shlex.quote(name))
    return [f'twostroke generate {quoted} --prompt "Once upon a time" --max-tokens 64', f"twostroke serve {quoted}"]


def _numbers(values: Mapping[str, Any], names: Mapping[str, str], source: str) -> list[Fact]:
    """Those of ``names`` that ``values`` has as numbers."""
    return [Fact(words, _number(key, values[key]), source) for key, words in names.items() if is_number(values.get(key))]


def _number(name: str, value: float) -> str:
    if name in ("tokens", "n_trained_parameters"):
        return format_count(value)
    by_itself = name.endswith(("_per_byte", "_loss", "_nats", "_ratio", "_per_token"))
    return f"{value:.4f}" if by_itself else format_value(name, value)


def _object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except CorruptFileError:
        return {}


def _short(name: str) -> str:
    """A name as a card shows it: one of the hub whole, of a path its end, so that no folder of this machine is published."""
    return name if _HUB_NAME.fullmatch(name) and not Path(name).exists() else _name(Path(name)) or name


def _usable(name: Any) -> str:
    """``name`` if the system could have a file called so; a file by a stranger may say anything."""
    fits = isinstance(name, str) and len(name) < 4096 and all(len(p.encode("utf-8", "replace")) < 256 for p in name.split("/"))
    return str(name) if fits else ""


def _of_run(directory: Path) -> bool:
    """Whether it is the ``model`` in the output of a training run."""
    return directory.name == "model" and (directory.parent / "recipe.json").is_file()


def _name(directory: Path) -> str:
    return directory.parent.name if _of_run(directory) else directory.name


def _written_at(directory: Path) -> str:
    """When the weights were written, UTC, as the ledger writes times."""
    from datetime import UTC, datetime

    newest = max((file.stat().st_mtime for file in directory.glob("*.safetensors")), default=0.0)
    return datetime.fromtimestamp(newest, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cell(text: str) -> str:
    """``text`` as one cell of a table."""
    return " ".join(text.replace("|", "\\|").split())
