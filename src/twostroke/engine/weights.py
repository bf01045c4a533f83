"""Other weights for an engine that runs: packed beside its steps, taken over between two of them.

``prepare`` does what takes long (reading, packing, a short prefill that finds the identity) in a thread of its own, and the
engine's loop only exchanges references. Requests that are under way finish on the weights they began with (``Generations``), or
are computed again by the new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, EngineError
from twostroke.core.heap import return_freed_memory
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.engine.key_offset import N_TOKENS, centre_keys
from twostroke.engine.kv_pool import KVPool
from twostroke.engine.loading import load, lowered
from twostroke.engine.native_runner import NativeRunner
from twostroke.engine.plan import Plan
from twostroke.engine.tiers.disk import DiskTier
from twostroke.engine.tiers.identity import identity_of, weights_digest
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.engine.torch_runner import TorchRunner
from twostroke.kernels.native_library import library
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

if TYPE_CHECKING:
    from jaxtyping import Float

Pool = KVPool | TiledKVPool

NICE = 10
"""Of the thread that packs: a tenth of a processor that steps would have used. At the engine's own priority its threads would
wait for each other at barriers."""


def make_runner(plan: Plan, pool: Pool, config: SchedulerConfig, native: bool) -> NativeRunner | TorchRunner:
    """What runs ``plan`` over ``pool``."""
    if not native:
        return TorchRunner(plan, pool, config)
    assert isinstance(pool, TiledKVPool)
    return NativeRunner(plan, pool, config)


def centres_keys(spec: ModelSpec, pool: Pool) -> bool:
    """Whether a head's mean key is taken from its keys before they are coded. A bound on scores and a sink beside them see what
    the softmax does not, so keys keep what they have in common there."""
    away = spec.departures
    return pool.scaled and away.attention_cap is None and not away.attention_sinks if isinstance(pool, TiledKVPool) else False


def fingerprint_of(identity: bytes, settings: EngineSettings) -> str:
    """A short name of the weights and of how they are computed."""
    return f"fp_{hashlib.blake2b(identity + settings.head_dtype.encode(), digest_size=8).hexdigest()}"


def form_of(pool: Pool) -> str:
    """What is said of the cache's form in an identity."""
    return f"{type(pool).__name__} {pool.dtype} {pool.page_tokens}"


def key_of(digest: str) -> bytes:
    """The name of weights in the keys of their pages."""
    return bytes.fromhex(digest)[:16]


@dataclass(frozen=True)
class Served:
    """What new weights must agree with: the model that is served, in the directory ``directory``."""

    directory: Path
    spec: ModelSpec
    plan: Plan
    settings: EngineSettings
    config: SchedulerConfig
    pool: Pool
    native: bool
    exit_layers: int | None


@dataclass(eq=False)
class Prepared:
    """Weights that an engine can take over at once. ``digest`` is their files', ``exits`` runs the first layers for drafts."""

    directory: Path
    digest: str
    plan: Plan
    pool: Pool
    runner: NativeRunner | TorchRunner
    exits: NativeRunner | None
    identity: bytes
    quantised: bool
    seconds: float
    disk: DiskTier | None = None


def prepare(directory: Path, served: Served, present: str | None) -> Prepared | None:
    """Read and pack the weights of ``directory`` in the calling thread alone, whose priority falls. None if they have the
    digest ``present``. Raises what ``loading.load`` and ``lower`` raise, and ConfigError where the model has another shape,
    scheme or tokenizer than ``served``."""
    began = time.perf_counter()
    with _behind_steps(served.native):
        loaded = load(directory, served.settings.dtype, served.native)
        _require_alike(loaded.spec, served.spec, directory)
        _require_same_tokenizer(directory, served.directory)
        if (family := scheme_of(loaded.weights).here.family) != served.plan.weights:
            raise ConfigError(
                f"{directory} would be held in {family}, and the served model is in {served.plan.weights}. Name a directory "
                "of the same format."
            )
        digest = weights_digest(directory)
        if digest == present:
            return None
        quantised = loaded.quantised
        plan, _ = lowered(loaded, served.settings, served.native, served.plan.crossovers)
        del loaded
        pool = served.pool.beside() if isinstance(served.pool, TiledKVPool) else served.pool
        identity = _identity(plan, digest, pool, served)
        runner = make_runner(plan, pool, served.config, served.native)
        exits = None
        if served.exit_layers is not None:
            assert isinstance(runner, NativeRunner)
            exits = NativeRunner(plan.first(served.exit_layers), runner.pool, served.config, runner)
    return Prepared(directory, digest, plan, pool, runner, exits, identity, quantised, time.perf_counter() - began)


@contextlib.contextmanager
def _behind_steps(native: bool) -> Iterator[None]:
    """The calling thread computes alone and gives way to the engine's."""
    loaded = library() if native else None
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    torch.set_num_threads(1)
    if loaded is not None:
        loaded.ts_run_alone(1)
    try:
        yield
    finally:
        if loaded is not None:
            loaded.ts_run_alone(0)


def _require_alike(spec: ModelSpec, served: ModelSpec, directory: Path) -> None:
    if spec == served:
        return
    for field in dataclasses.fields(spec):
        if field.compare and (new := getattr(spec, field.name)) != (old := getattr(served, field.name)):
            raise ConfigError(
                f"{directory} has {field.name}={new!r:.80}, and the served model {old!r:.80}. Weights are replaced by those of "
                "the same shape; start another server for this model."
            )


def _require_same_tokenizer(directory: Path, served: Path) -> None:
    """A directory without a tokenizer is one of weights alone."""
    new, old = directory / "tokenizer.json", served / "tokenizer.json"
    if new.is_file() and old.is_file() and new.read_bytes() != old.read_bytes():
        raise ConfigError(
            f"{directory} has another tokenizer.json than the served model. Its tokens would be read wrongly; start another "
            "server for it."
        )


def _identity(plan: Plan, digest: str, pool: Pool, served: Served) -> bytes:
    """The identity of an engine that starts with ``plan``. It computes in a pool of a few pages, whose offset of keys ``pool``
    gets."""
    config = served.config
    n_pages = min(config.n_pages, -(-N_TOKENS // config.page_tokens))
    small = replace(config, n_pages=n_pages)
    scratch = type(pool)(plan.spec, n_pages, config.page_tokens, pool.dtype)
    scheduler = Scheduler(small)
    runner = make_runner(plan, scratch, small, served.native)

    def compute(step: ScheduledStep) -> object:
        return runner.run(step, n_threads=1)

    if isinstance(scratch, TiledKVPool) and centres_keys(plan.spec, scratch):
        centre_keys(scratch, scheduler, plan.spec.vocab_size, compute)
        assert isinstance(pool, TiledKVPool)
        pool.key_offset.copy_(scratch.key_offset)
    return identity_of(digest, form_of(scratch), scratch.images(), scheduler, plan.spec.vocab_size, compute)


class Generations:
    """Runners by their requests' weights, while some finish on weights that were replaced. It has the interface of a runner.

    A step that holds requests of several weights is computed in as many parts, so a weight is read once for each.
    """

    def __init__(self, runners: Mapping[bytes, NativeRunner | TorchRunner], current: bytes) -> None:
        self.runners, self.current = dict(runners), current
        self.hidden = torch.empty((0, self.runner.plan.spec.d_model))
        self._best: tuple[Tensor, Tensor] | None = None

    @property
    def runner(self) -> NativeRunner | TorchRunner:
        """That of the weights that serve new requests."""
        return self.runners[self.current]

    def run(
        self, step: ScheduledStep, rows: Tensor | None = None, n_threads: int = 1, n_hidden: int = 0
    ) -> Float[Tensor, "kept V"]:
        wanted = np.array(step.sampled_rows() if rows is None else rows.tolist(), np.int64)
        n_logits, spec = len(wanted) - n_hidden, self.runner.plan.spec
        logits, self.hidden = torch.empty((n_logits, spec.vocab_size)), torch.empty((n_hidden, spec.d_model))
        best, tokens, all_known = torch.empty(n_logits), torch.empty(n_logits, dtype=torch.int64), True
        ends = np.cumsum(step.counts)
        owners = np.searchsorted(ends, wanted, side="right")
        for weights in dict.fromkeys(request.weights for request in step.requests):
            places = [i for i, request in enumerate(step.requests) if request.weights == weights]
            part, runner = _part(step, places, weights), self.runners[weights]
            # Rows of the part are those of its requests, one after another.
            shift = np.zeros(len(ends), np.int64)
            shift[places] = np.cumsum(part.counts) - ends[places]
            mine = np.flatnonzero(np.isin(owners, places))
            own = wanted[mine] + shift[owners[mine]]
            of_logits = torch.from_numpy(mine[mine < n_logits])
            of_hidden = torch.from_numpy(mine[mine >= n_logits] - n_logits)
            logits[of_logits] = runner.run(part, torch.from_numpy(own), n_threads, n_hidden=len(of_hidden))
            if len(of_hidden):
                self.hidden[of_hidden] = runner.hidden
            known = runner.best_of(len(of_logits))
            if known is None:
                all_known = False
            else:
                best[of_logits], tokens[of_logits] = known
        self._best = (best, tokens) if all_known else None
        return logits

    def best_of(self, n: int) -> tuple[Tensor, Tensor] | None:
        return None if self._best is None else (self._best[0][:n], self._best[1][:n])

    def release_logits(self) -> None:
        for runner in self.runners.values():
            runner.release_logits()

    def hold(self, parts: Any) -> Any:
        return self.runner.hold(parts)

    @property
    def experts(self) -> Any:
        return self.runner.experts


class Asleep:
    """In the place of a runner, while an engine holds no weights."""

    hidden = torch.empty((0, 0))
    experts = None

    def run(self, step: ScheduledStep, rows: Tensor | None = None, n_threads: int = 1, n_hidden: int = 0) -> Tensor:
        raise EngineError("the engine is asleep and holds no weights. Wake it first.")

    def best_of(self, n: int) -> None:
        """None: nothing was computed."""

    def release_logits(self) -> None:
        """Does nothing: there are none."""

    def hold(self, parts: Any) -> Any:
        raise EngineError("the engine is asleep and holds no weights. Wake it first.")


def _part(step: ScheduledStep, places: Sequence[int], weights: bytes) -> ScheduledStep:
    """What ``step`` computes of the requests at ``places``, all those of ``weights``."""
    at = {place: i for i, place in enumerate(places)}
    return replace(
        step,
        requests=[step.requests[i] for i in places],
        counts=[step.counts[i] for i in places],
        starts=[step.starts[i] for i in places],
        n_decodes=sum(i < step.n_decodes for i in places),
        grown=[request for request in step.grown if request.weights == weights],
        copies=[],
        drafts={at[i]: draft for i, draft in step.drafts.items() if i in at},
    )


def let_go(things: list[Any], finish: Callable[[], None] | None = None) -> None:
    """Drop the references in ``things``, the last ones to weights that are no longer needed, in a thread: giving hundreds of
    megabytes back takes longer than a step. ``finish`` is called before."""

    def drop() -> None:
        if finish is not None:
            finish()
        things.clear()
        return_freed_memory()

    threading.Thread(target=drop, name="old-weights", daemon=True).start()
