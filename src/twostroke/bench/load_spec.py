"""What a load is. It says which ``Workload`` is sent, and the planner simulates that very one."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from twostroke.core.checks import check_positive, check_whole
from twostroke.core.described import As
from twostroke.core.errors import ConfigError
from twostroke.core.tables import build
from twostroke.planner.serving.drawn import gaps_of, lengths_of
from twostroke.planner.serving.traces import read_trace
from twostroke.planner.serving.workload import Client, Turns, Workload
from twostroke.scheduling.sampling_params import SamplingParams

MOST_REQUESTS = 10_000_000
MOST_USERS = 100_000


@dataclass(frozen=True)
class LoadSpec:
    """A load. Give exactly one of ``request_rate`` (open loop, conversations/s; inf sends all at once), ``users`` (closed
    loop), ``trace`` (a file, see ``planner.serving.traces``) and ``clients`` (a file of TOML, ``[[client]]`` tables of
    ``workload.Client``). Lengths are (least, most) in tokens or a text of ``planner.serving.drawn``, as ``arrivals`` is.
    Raises ConfigError."""

    n_requests: int = 64
    request_rate: float | None = None
    arrivals: str = "poisson"
    max_concurrency: int | None = None
    users: int | None = None
    trace: str | None = None
    speed: float = 1.0  # of the trace
    length_scale: float = 1.0  # of the trace
    clients: str | None = None
    prompt_tokens: tuple[int, int] | str = (64, 64)
    output_tokens: tuple[int, int] | str = (64, 64)
    shared_prefix: int = 0  # tokens that every prompt begins with
    turns: int = 1
    think_s: float = 0.0
    endpoint: Literal["completions", "chat"] = "completions"
    model: str | None = None  # None: the first that /v1/models names
    adapters: tuple[str, ...] = ()  # models that requests name in turn instead
    temperature: float = 0.0
    ignore_eos: bool = True
    prompt_text: str | None = None  # a text file; None: random words
    same_prompts: bool = False  # the words of prompts follow from the seed, too
    warmup_requests: int = 3
    seed: int = 0
    timeout_s: float = 600.0
    more_fields: Mapping[str, Any] = field(default_factory=dict)  # of each request's body
    more_headers: Mapping[str, str] = field(default_factory=dict)  # of each request

    def __post_init__(self) -> None:
        given = [name for name in ("request_rate", "users", "trace", "clients") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError("give exactly one of request_rate (open loop), users (closed loop), trace and clients.")
        SamplingParams(temperature=self.temperature)  # a server would refuse every request
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate} must be above 0 requests/s, or inf.")
        gaps_of(self.arrivals)
        check_whole("n_requests", self.n_requests, most=MOST_REQUESTS)
        for name in ("users", "max_concurrency"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), most=MOST_USERS)
        if self.users is not None and self.max_concurrency is not None:
            raise ConfigError("max_concurrency is for open loops; in a closed loop users is the concurrency.")
        check_whole("warmup_requests", self.warmup_requests, 0, MOST_REQUESTS)
        check_whole("shared_prefix", self.shared_prefix, 0)
        check_positive("timeout_s", self.timeout_s)
        for name in ("speed", "length_scale"):
            check_positive(name, getattr(self, name))
        Turns(self.turns, self.think_s)
        for name in ("prompt_tokens", "output_tokens"):
            lengths_of(getattr(self, name))
        self._check_nothing_is_dropped(given[0])

    def _check_nothing_is_dropped(self, kind: str) -> None:
        """Options that a trace or clients say themselves, and a trace's without one."""
        own: dict[str, Any] = {
            "prompt_tokens": (64, 64),
            "output_tokens": (64, 64),
            "shared_prefix": 0,
            "turns": 1,
            "think_s": 0.0,
        }
        other: dict[str, Any] = {"speed": 1.0, "length_scale": 1.0} if kind != "trace" else {}
        if kind in ("trace", "clients"):
            other |= own
        if kind != "request_rate":
            other |= {"arrivals": "poisson"}
        for name, default in other.items():
            if getattr(self, name) != default:
                raise ConfigError(f"{name}={getattr(self, name)} has no effect beside {kind}. Leave it out.")

    @cached_property
    def workload(self) -> Workload:
        """The requests, of which ``bench`` sends each and the planner simulates the first ones. Raises ConfigError for a file
        that cannot be used."""
        lengths = lengths_of(self.prompt_tokens), lengths_of(self.output_tokens)
        turns = Turns(self.turns, self.think_s)
        if self.users is not None:
            return Workload.closed(
                self.users, self.n_requests, *lengths, shared_prefix=self.shared_prefix, turns=turns, seed=self.seed
            )
        if self.trace is not None:
            rows = read_trace(Path(self.trace), self.n_requests)
            return Workload.of_trace(rows, self.speed, scale=self.length_scale, cap=self.max_concurrency)
        if self.clients is not None:
            return Workload.of_clients(read_clients(Path(self.clients)), self.n_requests, self.max_concurrency, self.seed)
        return Workload.open(
            self.request_rate or math.inf, self.n_requests, *lengths, gaps=self.arrivals, cap=self.max_concurrency,
            shared_prefix=self.shared_prefix, turns=turns, seed=self.seed,
        )  # fmt: skip

    @property
    def rate_in_words(self) -> Annotated[float | str | None, "requests/s, or inf: all at once", As("request_rate")]:
        return "inf" if self.request_rate == math.inf else self.request_rate  # JSON has no infinity

    def at_rate(self, rate_per_s: float) -> LoadSpec:
        """The same requests at another rate."""
        return replace(self, request_rate=rate_per_s)


@dataclass(frozen=True)
class _ClientsFile:
    client: tuple[Client, ...] = ()


def read_clients(file: Path) -> tuple[Client, ...]:
    """The ``[[client]]`` tables of a TOML file. Raises ConfigError."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"clients {file} cannot be read: {error.strerror}. Name a file of [[client]] tables.") from None
    except ValueError as error:  # of TOML, and of bytes that are not text
        raise ConfigError(f"clients {file} is not TOML: {error}.") from None
    found = build(_ClientsFile, table, f"clients file {file}").client
    if not found:
        raise ConfigError(
            f"clients {file} names no client. Write [[client]] tables with rate, prompt_tokens and output_tokens."
        )
    return found
