"""One batch from a file to a file: ``twostroke batch``. It survives being killed, and goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from twostroke.core.aside import flush_to_disk, write_text
from twostroke.core.documents import read_object
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.fitted_exits import FITTED_EXITS
from twostroke.core.policy import MAX_RUNNING
from twostroke.core.spec import ModelSpec
from twostroke.ledger.meter import Meter
from twostroke.server import wire
from twostroke.server.admission import Admission
from twostroke.server.batch.journal import Journal, answered_in
from twostroke.server.batch.lines import BatchInput, Marks, read_input, told
from twostroke.server.batch.runner import BatchRunner
from twostroke.server.engine_client import EngineClient
from twostroke.server.launch import EngineChild, launch_engine
from twostroke.server.service import Service
from twostroke.server.text import ModelText

MOST_LINES = 10**6
"""Of a file: their ids are held in memory."""
AT_ONCE = 2 * MAX_RUNNING
"""Requests under way: those that fill a step, and as many that wait to take a place that comes free."""
MOST_PLACES = 2**20
"""Answers under way, so that no request is refused for the number of its prompts and answers."""
FORMAT = 1
NO_MATTER = frozenset(
    {"n_threads", "pin_threads", "huge_pages", "kv_dir", "kv_dir_bytes", "speculate", "lora_memory_bytes", "deterministic"}
)
"""Engine settings that change no answer, so that a job may go on with others."""
DECISIVE = frozenset(
    {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
     "adapter_config.json", FITTED_EXITS}
)  # fmt: skip
"""Files of a model, beside weights and templates, on which its answers depend."""


@dataclass(frozen=True)
class BatchPaths:
    given: Path
    output: Path
    errors: Path

    @property
    def job(self) -> Path:
        """There while the batch is not finished."""
        return self.output.with_name(f"{self.output.name}.job")


@dataclass(frozen=True)
class Job:
    """A batch whose files are open. ``began`` is what its job's file holds."""

    paths: BatchPaths
    given: BatchInput
    output: Journal
    errors: Journal
    marks: Callable[[str], Marks]
    began: Mapping[str, Any]

    @property
    def created(self) -> int:
        """What answers say of their time: when the input was last written, so that a second batch gives the same bytes."""
        found: int = self.began["created"]
        return found

    def check(self, ready: wire.Ready) -> None:
        """Note what the engine decided by itself when the batch began. Raises ConfigError where it decides otherwise now, which
        would change answers."""
        decided = {"--dtype": ready.dtype, "--max-model-len": ready.max_model_len}
        known = self.began.get("decided")
        if not isinstance(known, dict) or self.n_left == len(self.given):
            write_text(self.paths.job, msgspec.json.encode({**self.began, "decided": decided}).decode())
            return
        for option, value in decided.items():
            if value != known.get(option):
                raise ConfigError(f"the batch began with {option} {known.get(option)}, and this engine has {value}. Give it.")

    @property
    def n_left(self) -> int:
        return len(self.given) - len(self.output.done) - len(self.errors.done)

    def left(self) -> list[int]:
        """Places of the requests that have no answer yet."""
        return self.given.without(self.output.done | self.errors.done)

    def finish(self) -> None:
        """All is answered: the job's file goes, and an empty file of errors. Raises OSError."""
        self.output.sync()
        self.errors.sync()
        if not self.errors.done:
            self.paths.errors.unlink(missing_ok=True)
        self.paths.job.unlink(missing_ok=True)
        flush_to_disk(self.paths.output.parent)


def about(directory: Path, engine: EngineSettings, names: tuple[str, ...], adapters: Mapping[str, Path]) -> dict[str, Any]:
    """What decides the answers of a batch beside its input, as its job's file holds it. Files by name, size and time."""
    folders = {"model": directory, **{f"adapter {name}": path for name, path in adapters.items()}}
    files = {
        label: [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(path.iterdir())
            if file.suffix in (".safetensors", ".jinja") or file.name in DECISIVE
        ]
        for label, path in folders.items()
    }
    settings = {name: value for name, value in engine.changed().items() if name not in NO_MATTER}
    return {"files": files, "names": list(names), "engine": settings}


@contextlib.contextmanager
def opened_job(paths: BatchPaths, facts: Mapping[str, Any], names: tuple[str, ...], resume: bool) -> Iterator[Job | None]:
    """The batch, new or, with ``resume``, as an earlier process left it; None for one that was finished. ``facts`` are what
    ``about`` says, ``names`` the models that requests may ask for. The files are held for this process.

    Raises InputError, before anything is written, for an input with faults, an output that is there already, and a job that
    began with something else; and OSError."""
    _check_paths(paths)
    with contextlib.ExitStack() as stack:
        stream: BinaryIO = stack.enter_context(paths.given.open("rb"))
        given, faults = read_input(stream, MOST_LINES, names)
        if faults:
            raise InputError(told(faults, paths.given))
        known, marks = frozenset(given.ids), partial(Marks.of, given.sha256)
        job = {"format": FORMAT, "input_sha256": given.sha256, "created": int(os.fstat(stream.fileno()).st_mtime), **facts}
        if resume and not paths.job.exists():
            _require_finished(paths, known, marks)
            yield None
            return
        if resume:
            job = _stored(paths, job)
        else:
            for path in (paths.job, paths.output, paths.errors):
                if path.exists():
                    raise InputError(f"{path} exists already. Continue that batch with --resume, or name another output.")
            write_text(paths.job, msgspec.json.encode(job).decode())
        files = [stack.enter_context(_held(path)) for path in (paths.output, paths.errors)]
        output, errors = (
            Journal(descriptor, str(path), known, marks)
            for descriptor, path in zip(files, (paths.output, paths.errors), strict=True)
        )
        yield Job(paths, given, output, errors, marks, job)


def _check_paths(paths: BatchPaths) -> None:
    if not stat.S_ISREG(paths.given.stat().st_mode):
        raise InputError(f"{paths.given} is not a file. A batch is read more than once, so it cannot come from a pipe.")
    named: dict[str, Path] = {}
    for path in (paths.given, paths.output, paths.errors):
        if path is not paths.given:
            if path.exists() and not path.is_file():
                raise InputError(f"{path} is not a file. Name one.")
            if not path.parent.is_dir():
                raise InputError(f"{path}: the folder {path.parent} does not exist.")
        if str(path.resolve()) in named:
            raise InputError(f"{path} is named twice. Input, output and errors are three files.")
        named[str(path.resolve())] = path


def _require_finished(paths: BatchPaths, known: frozenset[str], marks: Callable[[str], Marks]) -> None:
    """Raises InputError unless the files hold an answer to each of ``known``, and nothing else."""
    done: set[str] = set()
    for path in (paths.output, paths.errors):
        if path.is_file():
            with path.open("rb") as stream:
                found, size = answered_in(stream, known, marks)
                done |= found
                if size != os.fstat(stream.fileno()).st_size:
                    raise InputError(f"{path} holds something else than answers to {paths.given}. Name another output.")
    if not done:
        raise InputError(f"{paths.output} holds no batch to resume. Start it without --resume.")
    if done != known:
        raise InputError(f"{paths.job} is missing, without which the batch cannot be resumed. Name another output.")


def _stored(paths: BatchPaths, job: dict[str, Any]) -> dict[str, Any]:
    """The job as it began. Raises ConfigError where it began with something else than ``job``."""
    stored = read_object(paths.job)
    if stored.get("format") != FORMAT or not isinstance(stored.get("created"), int):
        raise CorruptFileError(f"{paths.job} does not describe a batch. Name another output.")
    began = stored | job | {"created": stored["created"]}
    for name, what in (("input_sha256", f"the input {paths.given}"), ("files", "the model, or an adapter,"),
                       ("names", "--served-name"), ("engine", "an option of the engine")):  # fmt: skip
        # As JSON, because a list is a tuple where it did not pass a file.
        if msgspec.json.encode(stored.get(name)) != msgspec.json.encode(began[name]):
            raise ConfigError(
                f"{what} is not what the batch in {paths.output} began with. Resume with the same, or name another output."
            )
    return began


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is writing {path}. Wait for it, or name another output.") from None
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass
class Computed:
    """What one process computed of a batch. ``totals`` are the service's, ``engine`` the engine's counters, ``reasons`` why
    answers ended. ``stopped``: by a signal, before all was done."""

    totals: Mapping[str, float]
    reasons: Mapping[str, int]
    engine: Mapping[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    stopped: bool = False


async def compute(
    job: Job, command: list[str], child: EngineChild, text: ModelText, spec: ModelSpec, names: tuple[str, ...],
    adapters: Mapping[str, Path], meter: Meter, on_ready: Callable[[wire.Ready], None], advance: Callable[[int, int], None],
) -> Computed:  # fmt: skip
    """Compute what is left of ``job`` with an engine that was launched a moment ago, until all is done or a signal comes.
    ``advance`` gets the numbers of requests that were done by now, and of those the failed ones.

    Raises TwostrokeError if the engine does not start, and OSError if an answer cannot be written. Whatever ends it, what was
    done is in the files."""
    directories = {name: str(path.resolve()) for name, path in adapters.items()}
    client = EngineClient(lambda: launch_engine(command), child, adapters=directories)
    service = Service(client, text, spec, names, Admission(MOST_PLACES))
    n_before = len(job.given) - job.n_left
    runner = BatchRunner(
        service, job.given, job.marks, job.created, job.output, job.errors, at_once=lambda: AT_ONCE,
        on_line=lambda: advance(len(job.given) - job.n_left - n_before, len(job.errors.done)),
    )  # fmt: skip
    found, loop, stop = Computed(service.totals, runner.reasons), asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = asyncio.create_task(client.run())
    loaded, stopped = asyncio.create_task(client.wait_loaded()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({engine, loaded, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            job.check(loaded.result())
            on_ready(loaded.result())
            began = time.perf_counter()
            work = asyncio.create_task(runner.run())
            with meter:
                await asyncio.wait({engine, work, stopped}, return_when=asyncio.FIRST_COMPLETED)
                work.cancel()  # of no effect on what is done
                await asyncio.wait({work})
            found.elapsed_s = time.perf_counter() - began
            if not work.cancelled():
                work.result()
            found.engine = await client.stats()
        if engine.done():
            engine.result()
        found.stopped = job.n_left > 0
        return found
    finally:
        for task in (loaded, stopped):
            task.cancel()
        client.close()
        try:
            await engine
        finally:
            client.kill()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
