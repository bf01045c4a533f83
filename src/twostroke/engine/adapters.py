"""LoRA adapters beside the base's products, named by requests: read from PEFT directories, held within a budget of memory.

A product y = x·Wᵀ of a row with an adapter becomes y + (x·Aᵀ)·(scale·B)ᵀ. W stays as it is, whatever its scheme, so rows of
many adapters and of none share a step (Punica, arXiv 2310.18547; S-LoRA, arXiv 2311.03285). The runner holds an adapter in a
form of its own (``hold``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twostroke.core.dtypes import TORCH_NAMES, bytes_of
from twostroke.core.errors import CapacityError, ConfigError, CorruptFileError, InputError, TwostrokeError
from twostroke.core.policy import MAX_ADAPTER_RANK, MAX_ADAPTERS
from twostroke.core.schemes import ADAPTER_CODES
from twostroke.core.units import format_bytes
from twostroke.engine import plan as p
from twostroke.engine.lowering import head_rows
from twostroke.engine.meters import EngineStats
from twostroke.model.adapter_directory import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterConfig,
    Adapters,
    fingerprint,
    read_adapter_config,
    scales_inputs,
)
from twostroke.model.adapters import Target
from twostroke.model.families import stored_order
from twostroke.scheduling.request import Request

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Part:
    """What an adapter adds to outputs [``begin``, ``begin`` + n) of a lowered matrix: B·A·x, with the scale in B."""

    begin: int
    a: Float[Tensor, "r K"]
    b: Float[Tensor, "n r"]


Parts = dict[str, tuple[Part, ...]]
"""By the ``module`` of the operation that multiplies the matrix."""

Hold = Callable[[Parts], Any]


@dataclass(eq=False)
class Adapter:
    """An adapter that requests may name. ``key`` tells it from every other that this engine has known, of the same name too.

    ``held`` is the runner's form of it, None while it is not in memory. ``n_users`` running requests need it there.
    ``removed``: no new request can name it.
    """

    name: str
    directory: Path
    key: bytes
    n_bytes: int
    signature: tuple[int, ...]
    held: Any = None
    n_users: int = 0
    last_used: int = 0
    removed: bool = False


@dataclass
class AdapterCounts:
    """Since the start: reads from disk, admitted requests whose adapter was in memory, adapters that made room for others."""

    loads: int = 0
    load_s: float = 0.0
    hits: int = 0
    evictions: int = 0


@dataclass(eq=False)
class AdapterStore:
    """The adapters of one plan, at most ``MAX_ADAPTERS``, of which those that were used last are in memory, ``budget_bytes`` at
    most together. ``directory`` is the base's, ``hold`` the runner's, ``element`` the type of a number that it holds."""

    plan: p.Plan
    directory: Path
    budget_bytes: int
    hold: Hold
    element: str
    quantised: bool = False
    counts: AdapterCounts = field(default_factory=AdapterCounts)

    def __post_init__(self) -> None:
        self.known: dict[str, Adapter] = {}
        self._in_memory: list[Adapter] = []
        self._n_added = self._clock = 0
        # Of codes the runner rounds once, from the numbers as they are stored.
        self._dtype = torch.float32 if self.element == ADAPTER_CODES else getattr(torch, TORCH_NAMES[self.element])
        self._base_fingerprint: str | None = None

    def rebase(self, plan: p.Plan, directory: Path, quantised: bool) -> None:
        """Adapters that are loaded from now on are those of other weights of the same shape."""
        self.plan, self.directory, self.quantised, self._base_fingerprint = plan, directory, quantised, None

    @property
    def held_bytes(self) -> int:
        return sum(adapter.n_bytes for adapter in self._in_memory)

    @property
    def n_held(self) -> int:
        return len(self._in_memory)

    def add(self, name: str, directory: Path | str) -> Adapter:
        """Let requests name the adapter in ``directory``, and read it if there is room. Raises InputError for a name that is
        taken or no such directory, ConfigError for an adapter that is not supported, CorruptFileError for one that does not
        fit the base, and CapacityError beyond ``MAX_ADAPTERS`` or the budget; then nothing has changed."""
        if name in self.known:
            raise InputError(f"adapter {name!r} is loaded already. Unload it first, or take another name.", field="lora_name")
        if len(self.known) >= MAX_ADAPTERS:
            raise CapacityError(f"{MAX_ADAPTERS} adapters are loaded, which is the most. Unload one.")
        self._n_added += 1
        key = b"adapter" + self._n_added.to_bytes(8, "little")
        adapter = Adapter(name, Path(directory), key, 0, _signature(Path(directory)))
        weights = self._open(adapter)
        if self._make_room(adapter.n_bytes):
            self._read(adapter, weights)
        self.known[name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Let no further request name it. Its memory is freed with the last request that uses it. Raises InputError."""
        adapter = self.get(name)
        del self.known[name]
        adapter.removed = True
        if adapter.n_users == 0:
            self._drop(adapter)

    def get(self, name: str) -> Adapter:
        """Raises InputError for an unknown name."""
        if name not in self.known:
            loaded = ", ".join(self.known) or "none"
            raise InputError(f"adapter {name!r:.100} is not loaded. Loaded: {loaded:.500}.", field="lora")
        return self.known[name]

    def claim(self, request: Request) -> bool:
        """Have the adapter of ``request`` in memory until ``release``. Returns False if running requests need all of the
        budget. If its files cannot be read any more, it is not ``held`` afterwards, and the request must end."""
        adapter = request.adapter
        if not isinstance(adapter, Adapter):
            return True
        if adapter.held is not None:
            self.counts.hits += 1
        elif not self._make_room(adapter.n_bytes):
            return False
        else:
            try:
                self._read(adapter, self._open(adapter))
            except (TwostrokeError, OSError):
                adapter.held = None
        self._clock += 1
        adapter.last_used = self._clock
        adapter.n_users += 1
        return True

    def release(self, request: Request) -> None:
        """``request`` runs no longer."""
        adapter = request.adapter
        if isinstance(adapter, Adapter):
            adapter.n_users -= 1
            if adapter.removed and adapter.n_users == 0:
                self._drop(adapter)

    def unheld(self, requests: Iterable[Request]) -> list[str]:
        """Ids of those whose adapter could not be read: they were computed without it."""
        if not self._n_added:  # most engines have no adapters, and this is asked for at each step
            return []
        return [r.id for r in requests if isinstance(r.adapter, Adapter) and r.adapter.held is None]

    def report(self, stats: EngineStats) -> None:
        """Fill in the adapters' numbers."""
        counts = self.counts
        stats.adapters, stats.adapters_held, stats.adapter_bytes = len(self.known), self.n_held, self.held_bytes
        stats.adapter_loads, stats.adapter_load_s = counts.loads, counts.load_s
        stats.adapter_hits, stats.adapter_evictions = counts.hits, counts.evictions

    def _drop(self, adapter: Adapter) -> None:
        adapter.held = None
        if adapter in self._in_memory:
            self._in_memory.remove(adapter)

    def _make_room(self, n_bytes: int) -> bool:
        """Drop idle adapters, the one that was used longest ago first, until ``n_bytes`` fit. Returns False, and drops none, if
        they cannot."""
        idle = sorted((a for a in self._in_memory if a.n_users == 0), key=lambda adapter: adapter.last_used)
        left = self.budget_bytes - self.held_bytes - n_bytes
        if left + sum(adapter.n_bytes for adapter in idle) < 0:
            return False
        for adapter in idle:
            if left >= 0:
                break
            left += adapter.n_bytes
            self._drop(adapter)
            self.counts.evictions += 1
        return True

    def _open(self, adapter: Adapter) -> Adapters:
        """Its files, checked against the base, without reading a tensor."""
        directory = adapter.directory
        config = read_adapter_config(directory)
        if config.nf4 is not None:
            raise ConfigError(
                f"{directory} was trained beside weights in NF4 and corrects their rounding; beside others it computes "
                "something else. Serve the directory itself as a model: it is merged when it is read."
            )
        if config.fingerprint is not None and not self.quantised and config.fingerprint != self._fingerprint:
            raise CorruptFileError(
                f"{directory} was trained on other weights than those of {self.directory}. Serve its own base, "
                f"{config.base:.200}."
            )
        if scales_inputs(self.directory) and not self._is_base_of(config):
            raise ConfigError(
                f"{self.directory} was rounded with scaled inputs (AWQ), and {directory} was trained on the model before that: "
                "it would compute something else. Serve a copy that was rounded another way, as --rounding gptq."
            )
        weights = Adapters(directory, self.plan.spec, config)
        if weights.widest > MAX_ADAPTER_RANK:
            raise ConfigError(f"{directory} has rank {weights.widest}; adapters of up to {MAX_ADAPTER_RANK} are served.")
        modules = {op.module for op in self.plan.ops if isinstance(op, p.Adaptable)}
        lacking = next((target for target in weights.targets.values() if target.module not in modules), None)
        if lacking is not None:
            raise ConfigError(
                f"{directory} adapts {lacking.stored}, which is folded into other matrices or one of a mixture's when it is "
                "served. Serve the directory itself as a model: it is merged when it is read."
            )
        adapter.n_bytes = int(weights.n_elements * bytes_of(self.element))
        if adapter.n_bytes > self.budget_bytes:
            raise CapacityError(
                f"{directory} takes {format_bytes(adapter.n_bytes)}, and adapters may take {format_bytes(self.budget_bytes)}. "
                "Raise --lora-memory-gib."
            )
        return weights

    def _is_base_of(self, config: AdapterConfig) -> bool:
        """Whether an adapter was trained on this very directory: by its fingerprint, else by its base's name."""
        if config.fingerprint is not None:
            return config.fingerprint == self._fingerprint
        return Path(config.base).name == self.directory.resolve().name

    @property
    def _fingerprint(self) -> str:
        if self._base_fingerprint is None:
            self._base_fingerprint = fingerprint(self.directory)
        return self._base_fingerprint

    def _read(self, adapter: Adapter, weights: Adapters) -> None:
        began = time.perf_counter()
        if _signature(adapter.directory) != adapter.signature:
            raise CorruptFileError(f"the files of {adapter.directory} have changed since adapter {adapter.name!r} was loaded.")
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # hundreds of short operations: beside a busy core a second thread made them 20 times as long
        try:
            adapter.held = self.hold(parts_of(self.plan, weights, self._dtype))
        finally:
            torch.set_num_threads(n_threads)
        self._in_memory.append(adapter)
        self.counts.loads += 1
        self.counts.load_s += time.perf_counter() - began


def _signature(directory: Path) -> tuple[int, ...]:
    """What changes when an adapter's files do. Raises InputError if one is missing."""
    found: list[int] = []
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        try:
            stat = (directory / name).stat()
        except (OSError, ValueError):  # a name that no file can have
            raise InputError(
                f"{directory} has no {name}. Name a directory with an adapter in PEFT's layout.", field="lora_path"
            ) from None
        found += (stat.st_mtime_ns, stat.st_size)
    return tuple(found)


@torch.no_grad()
def parts_of(plan: p.Plan, weights: Adapters, dtype: torch.dtype) -> Parts:
    """The parts of ``weights`` by module, in ``dtype``, with B's rows in the order of the lowered matrices. Raises
    CorruptFileError for a number that is not finite."""
    projections = {op.module for op in plan.ops if isinstance(op, p.QkvProjection)}
    order = head_rows(plan.spec) if projections else None
    found: dict[str, tuple[Part, ...]] = {}
    for target, part in _parts(weights, order, projections, dtype):
        found[target.module] = (*found.get(target.module, ()), part)
    return found


def _parts(weights: Adapters, order: Tensor | None, projections: set[str], dtype: torch.dtype) -> Iterator[tuple[Target, Part]]:
    for target in weights.targets.values():
        a, b = weights.pair(target)
        if not bool(torch.isfinite(a.sum() + b.sum())):
            raise CorruptFileError(f"the adapter of {target.stored} holds numbers that are not finite. Save it again.")
        if target.by_group is not None:
            b = b[stored_order(target.by_group, torch.arange(len(b))).argsort()]
        if target.module in projections and order is not None:
            b = b[order[target.begin : target.begin + target.rows] - target.begin]
        yield target, Part(target.begin, a.to(dtype).contiguous(), b.to(dtype).contiguous())
