"""``EngineSettings``: how the inference engine holds and runs a model. Options of commands, ``LLM(...)`` and what the server
tells its engine process are made of its fields."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.core import policy
from twostroke.core.documents import MAX_INTEGER, is_integer
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import ASKED, CACHE_TYPES, WEIGHTS
from twostroke.core.tables import build
from twostroke.core.topology import CORES, NODES

RUNNERS = ("native", "torch")


AT = "at:"
"""What stands before a threshold of ``early_exit``."""

OFF, NGRAM, EXIT, DRAFT, EXIT_AFTER = "off", "ngram", "exit", "draft:", "exit:"
"""Where drafts come from: nowhere, repeats in the request's own text and in past outputs, the model's own first layers, the
model behind ``DRAFT``, or so many of its own layers as stand behind ``EXIT_AFTER``."""


def _is_threshold(text: str) -> bool:
    return re.fullmatch(r"[01]|0?\.[0-9]{1,9}|1\.0{1,9}", text) is not None


def _is_ratio(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,9})?", text) is not None and float(text) > 1


_BEHIND: dict[str, Callable[[str], bool]] = {
    "DIR": bool,
    "RATIO above 1": _is_ratio,
    "THRESHOLD from 0 to 1": _is_threshold,
    "LAYERS": lambda text: text.isascii() and text.isdigit() and len(text) <= 5 and int(text) > 0,
}
"""What may stand behind the beginning of a value, in the words of help and errors."""


class Setting(NamedTuple):
    """What is said of a field: its help, the names that it may have beside "auto" (none: it is a number), its command-line
    option (None: it has no option), how many of the field's units one of the option's is, the largest number, how a value may
    begin and what goes on behind it, and whether it is a switch that is true or false, or a path."""

    help: str
    choices: tuple[str, ...] = ()
    option: str | None = None
    unit: int = 1
    most: int = MAX_INTEGER
    begins: tuple[tuple[str, str], ...] = ()
    switch: bool = False
    is_path: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        """What a reader is told that it may be, beside "auto"."""
        return (*self.choices, *map("".join, self.begins))

    def allows(self, value: object) -> bool:
        """Whether ``value`` is one of the choices, or goes on behind what one may begin with."""
        if value in ("auto", *self.choices):
            return True
        text = value if isinstance(value, str) else ""
        return any(text.startswith(begin) and _BEHIND[word](text.removeprefix(begin)) for begin, word in self.begins)


def _choice(
    help: str,
    choices: tuple[str, ...],
    option: str | None = None,
    default: str = "auto",
    begins: tuple[tuple[str, str], ...] = (),
) -> Any:
    setting = Setting("", choices, option, begins=begins)
    text = f"{help}: auto, {', '.join(setting.named[:-1])} or {setting.named[-1]}."
    return dataclasses.field(default=default, metadata={"setting": setting._replace(help=text)})


def _number(help: str, default: int | None = None, option: str | None = None, unit: int = 1, most: int = MAX_INTEGER) -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(help, (), option, unit, most)})


def _switch(help: str, option: str) -> Any:
    return dataclasses.field(default=False, metadata={"setting": Setting(help, option=option, switch=True)})


def _path(help: str, option: str) -> Any:
    return dataclasses.field(default=None, metadata={"setting": Setting(help, option=option, is_path=True)})


@dataclass(frozen=True)
class EngineSettings:
    """``dtype`` auto: as a quantised directory is, else bf16 where the CPU has products of it (AVX-512 or newer), else fp32.
    ``head_dtype`` and ``kv_dtype`` auto: fp32 beside fp32, else bf16. ``runner`` auto: native where the library was built.

    ``max_model_len`` None: the model's positions, or fewer where the cache is smaller. ``kv_cache_bytes`` None: a quarter of
    the free memory, at most what ``max_running`` requests of full length need. ``n_threads`` None: ``OMP_NUM_THREADS``, else
    every core this process may use, and one alone for small steps. ``pin_threads`` cores (auto): each native thread has a core
    of its own, all as near together as they go; nodes: they are spread over all NUMA nodes, and each one's part of the weights
    lies in its node's memory. ``huge_pages`` auto: the system is asked for them; on: it is made to, at the end of the start.
    ``speculate`` ngram: drafts are repeats in the request's own text and in past outputs, as many as pay; auto: the same where
    the runner is native, whose results do not depend on how many rows a step has, and where nothing repeats those of exit if
    the model was trained for it; draft:DIR: drafts are a smaller model's with the same vocabulary; exit:LAYERS: those of the
    model's own first layers, exit: of a quarter of them.
    ``max_step_ratio`` RATIO, above 1: as much of prompts goes beside requests that decode as makes a step so many times as long
    as it is predicted without, corrected by the steps that were measured; auto: ``policy.STEP_RATIO`` where the machine was
    calibrated, in a server (``LLM`` begins with off); off: as much as ``token_budget`` allows.
    ``early_exit`` at:THRESHOLD: a token is taken from an earlier layer if its probability is so much above the next one's (0 to
    1; 1: never); auto: by the threshold that was fitted to the model, so that a bounded share of tokens changes.
    ``deterministic``: the engine starts only where each log-probability has the same bits in any batch, chunks, number of
    threads and prefix hit. Raises ConfigError for a value out of range.
    """

    dtype: str = _choice("How weights are held", ASKED, "--dtype")
    head_dtype: str = _choice("How the output head is held", WEIGHTS, "--head-dtype")
    kv_dtype: str = _choice("How keys and values are cached", CACHE_TYPES, "--kv-dtype")
    runner: str = _choice("What runs a step", RUNNERS)
    max_model_len: int | None = _number(
        "Longest prompt and output together, in tokens. Default: the model's.", option="--max-model-len"
    )
    kv_cache_bytes: int | None = _number(
        "Memory of the KV cache, in GiB. Default: chosen by the engine.", option="--kv-cache-gib", unit=2**30
    )
    max_running: int = _number("Most requests in one step.", policy.MAX_RUNNING, "--max-running")
    token_budget: int = _number("Most tokens in one step.", policy.TOKEN_BUDGET, "--token-budget")
    max_step_ratio: str = _choice(
        "Times as long as prompts may make a step in which requests decode",
        (OFF,),
        "--max-step-ratio",
        begins=(("", "RATIO above 1"),),
    )
    page_tokens: int = _number("Tokens of a page of the cache.", policy.PAGE_TOKENS)
    n_threads: int | None = _number(
        "Threads of the engine. Default: the cores there are.", option="--threads", most=policy.MOST_THREADS
    )
    pin_threads: str = _choice(
        "Keep each thread on one processor, near together or over all NUMA nodes", (OFF, CORES, NODES), "--pin-threads", OFF
    )
    huge_pages: str = _choice("Large pages for weights and cache", (OFF, "on"), "--huge-pages")
    lora_memory_bytes: int | None = _number("Memory of adapters, in GiB. Default: 2.", option="--lora-memory-gib", unit=2**30)
    kv_dir: str | None = _path("Directory in which cached prefixes outlive memory and the process.", "--kv-dir")
    kv_dir_bytes: int | None = _number("Largest file of them, in GiB. Default: 10.", option="--kv-dir-gib", unit=2**30)
    speculate: str = _choice(
        "Drafts that a step checks beside its tokens",
        (OFF, NGRAM, EXIT),
        "--speculate",
        OFF,
        ((DRAFT, "DIR"), (EXIT_AFTER, "LAYERS")),
    )
    early_exit: str = _choice(
        "Let rows leave before the last layer, unchecked, once the model is sure of their token",
        (OFF,),
        "--early-exit",
        OFF,
        ((AT, "THRESHOLD from 0 to 1"),),
    )
    deterministic: bool = _switch(
        "Start only where log-probabilities are the same bits in any batch: needs the native library.", "--deterministic"
    )
    separate_prefixes: bool = False  # known prefixes are looked for among those of the same client only
    in_server: bool = False  # HTTP and its clients want cores, so more steps take one thread
    replicas: int = 1  # engines like this one on this machine, which share its memory and one copy of the packed weights

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if setting.switch:
                if not isinstance(value, bool):
                    raise ConfigError(f"{name}={value!r} must be true or false.")
            elif setting.choices:
                if not setting.allows(value):
                    raise ConfigError(f"{name}={value!r} is not known. Use one of auto, {', '.join(setting.named)}.")
            elif setting.is_path:
                if value is not None and not (isinstance(value, str) and value):
                    raise ConfigError(f"{name}={value!r} must be the path of a directory.")
                if value is not None and Path(value).exists() and not Path(value).is_dir():
                    raise ConfigError(f"{name}={value!r} is not a directory. Name one, or one that is to be made.")
            elif value is not None and not (is_integer(value) and 1 <= value <= setting.most):
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 to {setting.most}.")
        if self.kv_dir_bytes is not None and self.kv_dir is None:
            raise ConfigError(
                f"kv_dir_bytes={self.kv_dir_bytes} bounds the file in kv_dir. Name that directory, or leave it out."
            )
        if not (is_integer(self.replicas) and self.replicas >= 1):
            raise ConfigError(f"replicas={self.replicas!r} must be a whole number, at least 1.")

    def behind_http(self) -> EngineSettings:
        """The same engine in a server's process, or for the plan of one."""
        return dataclasses.replace(self, in_server=True)

    def changed(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}

    def to_json(self) -> str:
        """Them, as ``engine_settings`` reads them."""
        return json.dumps(self.changed())


SETTINGS: dict[str, Setting] = {
    f.name: f.metadata["setting"] for f in dataclasses.fields(EngineSettings) if "setting" in f.metadata
}
"""Field → what is said of it."""


def engine_settings(text: str) -> EngineSettings:
    """What ``to_json`` wrote. Raises ConfigError for an unknown name or a value of another type."""
    return build(EngineSettings, json.loads(text), "engine settings")
