"""The batches of a server: accepted, computed behind its other requests, one after another, and there again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import secrets
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from twostroke.core.errors import InputError
from twostroke.server.admission import Admission
from twostroke.server.batch.journal import Journal
from twostroke.server.batch.lines import BatchInput, Fault, Marks, Url, read_input
from twostroke.server.batch.runner import BatchRunner
from twostroke.server.batch.store import FileRecord, FileStore
from twostroke.server.callers import Caller
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.metrics import Metrics
from twostroke.server.protocol import MAX_PRIORITY
from twostroke.server.served import Served
from twostroke.server.service import Service

log = logging.getLogger("twostroke.server")

MOST_LINES = 50_000
MOST_UNFINISHED = 100
"""Batches of one client that wait or are computed; the next gets 429."""
MOST_KEPT = 10_000
"""Batches that are remembered: of more, the oldest that are over are forgotten."""
WINDOW_S = 24 * 3600
AT_ONCE = 8
"""Requests under way while no other request is."""
BESIDE = 1
"""Requests under way beside others. Each begun one is a prompt that the others' next token waits for."""
LATELY_S = 10.0
"""After the last of the others for so long another is expected, which would find a batch's requests under way."""
RETRY_S = 30.0
"""After which a batch goes on that a full disk held up."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class CreateBatch(Struct, forbid_unknown_fields=True):
    """Compute the requests of the file ``input_file_id``, all of which are for ``endpoint``."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Url
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
        ] | None
    ) = None  # fmt: skip


class LineError(Struct):
    code: str
    line: int | None
    message: str
    param: str | None = None


class LineErrors(Struct):
    data: list[LineError]
    object: str = "list"


class Counts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(Struct, forbid_unknown_fields=True):
    """OpenAI's batch object, and whose it is. Times are whole seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    owner: str = ""
    status: Status = "validating"
    object: str = "batch"
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)

    def file_of(self, what: str) -> str:
        """Id of the file of its "output" or "errors", which no other batch has."""
        return f"file-{hashlib.sha256(f'{self.id} {what}'.encode()).hexdigest()[:32]}"


def behind(service: Service) -> Service:
    """``service`` for requests of batches: they take no places from interactive requests, and do not count
    in the metrics of their latencies."""
    totals: dict[str, float] = dict.fromkeys(service.totals, 0)
    own = Admission(service.admission.limit)
    return replace(service, admission=own, metrics=Metrics(), served=Served(), totals=totals, capture=None)


class Batches:
    """Batches over the files of ``store``, computed by ``service``'s engine. Call ``run`` in a task of its own."""

    def __init__(self, store: FileStore, service: Service) -> None:
        self.store = store
        self._service, self._behind = service, behind(service)
        found = sorted(store.read_records("batch_", BatchRecord), key=lambda record: (record.created_at, record.id))
        self.records = {record.id: record for record in found}
        self._news = asyncio.Event()
        self._current: BatchRecord | None = None  # the one that is being computed
        self._cancelled = asyncio.Event()  # whether it is to stop
        self._saving = asyncio.Lock()
        self._others_s = -math.inf  # when another request was last under way
        unfinished = [record for record in found if record.status in UNFINISHED]
        store.remove_strays({record.file_of(what) for record in unfinished for what in ("output", "errors")})

    # Asked for by clients.

    async def create(self, asked: CreateBatch, owner: str) -> BatchRecord:
        """Raises ApiError 404 for a file that is not there, and 429 where too many batches wait."""
        file = self.store.of(owner, asked.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise bad_request(f"the file's purpose is {file.purpose!r}; a batch needs one for 'batch'.", "input_file_id")
        if sum(r.owner == owner and r.status in UNFINISHED for r in self.records.values()) >= MOST_UNFINISHED:
            message = f"{MOST_UNFINISHED} batches are not finished. Try again when one is."
            raise ApiError(429, message, code="too_many_batches", headers={"retry-after": "60"})
        now = int(time.time())
        record = BatchRecord(
            f"batch_{secrets.token_hex(16)}", asked.endpoint, asked.input_file_id, asked.completion_window, now, now + WINDOW_S,
            asked.metadata, owner,
        )  # fmt: skip
        await self._save(record)
        self.records[record.id] = record
        over = [each.id for each in self.records.values() if each.status not in UNFINISHED]
        for old in over[: max(0, len(self.records) - MOST_KEPT)]:
            del self.records[old]
            self.store.remove_record(old)
        self._news.set()
        return record

    def get(self, batch_id: str, owner: str) -> BatchRecord:
        """Raises ApiError 404."""
        record = self.records.get(batch_id)
        if record is None or record.owner != owner:
            raise ApiError(404, f"there is no batch {batch_id!r:.100}.", "batch_id", "batch_not_found")
        return record

    async def cancel(self, record: BatchRecord) -> None:
        """Begin no further request of it. Raises ApiError 400 for a batch that is over."""
        if record.status not in ("validating", "in_progress", "cancelling"):
            raise bad_request(f"the batch is {record.status} and cannot be cancelled.", "batch_id")
        record.status, record.cancelling_at = "cancelling", record.cancelling_at or int(time.time())
        if record.in_progress_at is None:
            record.status, record.cancelled_at = "cancelled", record.cancelling_at
        if record is self._current:
            self._cancelled.set()
        await self._save(record)

    def uses(self, file_id: str) -> BatchRecord | None:
        """The unfinished batch that reads or writes the file."""
        for record in self.records.values():
            if record.status in UNFINISHED and file_id in (
                record.input_file_id, record.file_of("output"), record.file_of("errors")
            ):  # fmt: skip
                return record
        return None

    # The work.

    async def run(self) -> None:
        """Compute batches in the order in which they came, until cancelled. At the next start each goes on where it was."""
        while True:
            self._news.clear()
            record = next((record for record in self.records.values() if record.status in UNFINISHED), None)
            if record is None:
                await self._news.wait()
                continue
            self._current = record
            self._cancelled.clear()
            try:
                await self._take(record)
            except OSError as error:
                log.error("batch %s goes on in %g s: %s", record.id, RETRY_S, error)
                await asyncio.sleep(RETRY_S)

    async def _take(self, record: BatchRecord) -> None:
        """Take a batch to its end, from wherever it is. Raises OSError."""
        try:
            await self._work(record)
        except OSError:
            raise
        except Exception as error:
            # Neither the message nor values are logged, because an exception may carry a prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s in batch %s\n%s", type(error).__name__, record.id, where)
            await self._fail(record, [Fault(0, "internal_error", "the server failed on this batch.")])

    async def _work(self, record: BatchRecord) -> None:
        try:
            stream = self.store.content(record.input_file_id)
        except FileNotFoundError:
            await self._fail(record, [Fault(0, "file_not_found", "the input file is gone.", "input_file_id")])
            return
        with stream, os.fdopen(os.dup(stream.fileno()), "rb") as buffered:
            # Of one that has begun an adapter may be gone: then its requests get an error, and no others do.
            names = None if record.in_progress_at is not None else self._service.served_names
            given, faults = await asyncio.to_thread(read_input, buffered, MOST_LINES, names, record.endpoint)
            if record.status == "cancelled":
                return
            if faults:
                await self._fail(record, faults)
                return
            await self._compute(record, given)

    async def _compute(self, record: BatchRecord, given: BatchInput) -> None:
        known, marks = frozenset(given.ids), partial(Marks.of, record.id)
        with contextlib.ExitStack() as stack:
            output, errors = [
                await asyncio.to_thread(
                    Journal, stack.enter_context(self.store.writable(file_id)), f"{file_id}.jsonl", known, marks
                )
                for file_id in map(record.file_of, ("output", "errors"))
            ]
            runner = BatchRunner(
                self._behind, given, marks, record.created_at, output, errors, at_once=self._at_once, priority=MAX_PRIORITY,
                caller=self._caller(record), on_line=lambda: _count(record, given, output, errors),
            )  # fmt: skip
            _count(record, given, output, errors)
            if record.in_progress_at is None:
                record.status, record.in_progress_at = "in_progress", int(time.time())
                await self._save(record)
            if record.status == "in_progress":
                try:
                    await self._until_stopped(record, runner)
                except InputError as error:
                    await self._fail(record, [Fault(0, "input_changed", str(error), "input_file_id")])
                    return
            if record.cancelling_at is None and runner.left() and record.expired_at is None:
                record.expired_at = int(time.time())
            record.status, record.finalizing_at = "finalizing", record.finalizing_at or int(time.time())
            await self._save(record)
            if record.expired_at is not None:
                await runner.fail(runner.left(), "batch_expired", "the completion window ended before it was computed.")
            await asyncio.to_thread(output.sync)
            await asyncio.to_thread(errors.sync)
        record.output_file_id = await self._published(record, "output", output)
        record.error_file_id = await self._published(record, "errors", errors)
        now = int(time.time())
        if record.expired_at is not None:
            record.status = "expired"
        elif record.cancelling_at is not None:
            record.status, record.cancelled_at = "cancelled", now
        else:
            record.status, record.completed_at = "completed", now
        await self._save(record)

    def _caller(self, record: BatchRecord) -> Caller:
        keys = self._service.keys
        account = None if keys is None else keys.owned(record.owner)
        return Caller(f"batch {record.owner}", account, limited=False)

    async def _until_stopped(self, record: BatchRecord, runner: BatchRunner) -> None:
        """Until all is done, the batch is cancelled, or its window has ended. Raises what ``runner`` raises."""
        work, cancelled = asyncio.create_task(runner.run()), asyncio.create_task(self._cancelled.wait())
        try:
            left_s = max(0.0, record.expires_at - time.time())
            await asyncio.wait({work, cancelled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelled.cancel()
            work.cancel()  # of no effect on what is done
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    def _at_once(self) -> int:
        """One beside interactive requests, or soon after them: then a step has one prompt of a batch at most."""
        admission, now_s = self._service.admission, time.monotonic()
        if admission.active or admission.arriving:
            self._others_s = now_s
        return BESIDE if now_s - self._others_s < LATELY_S else AT_ONCE

    async def _published(self, record: BatchRecord, what: str, journal: Journal) -> str | None:
        """The id of the file, which its owner can read from now on; None for an empty one, which is removed."""
        file_id = record.file_of(what)
        if not journal.size:
            self.store.remove_content(file_id)
            return None
        name = f"{record.id}_{what}.jsonl"
        file = FileRecord(file_id, journal.size, int(time.time()), name, "batch_output", record.owner)
        await asyncio.to_thread(self.store.keep, file)
        return file_id

    async def _fail(self, record: BatchRecord, faults: list[Fault]) -> None:
        record.status, record.failed_at = "failed", int(time.time())
        record.errors = LineErrors([LineError(f.code, f.line or None, f.message, f.param) for f in faults])
        await self._save(record)

    async def _save(self, record: BatchRecord) -> None:
        async with self._saving:
            await asyncio.to_thread(self.store.write_record, record.id, record)


def _count(record: BatchRecord, given: BatchInput, output: Journal, errors: Journal) -> None:
    record.request_counts = Counts(len(given), len(output.done), len(errors.done))


def shown(record: Struct) -> dict[str, Any]:
    """A record as its owner sees it."""
    found: dict[str, Any] = msgspec.to_builtins(record)
    del found["owner"]
    return found
