"""The ledger: predictions frozen before a run and measurements made by it, in one append-only SQLite file.

Two tables and no more. ``predictions`` holds one row per frozen run; ``measurements`` one row per measurement, any number
per run. Rows are never changed or removed: triggers refuse UPDATE and DELETE. Several processes may write at once
(write-ahead log, ``BEGIN IMMEDIATE``, a busy timeout), and one that is killed loses at most the row it was writing.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, CorruptFileError, InputError, TwostrokeError, did_you_mean
from twostroke.core.paths import ledger_path
from twostroke.core.profile import read_fingerprint
from twostroke.ledger.code_version import code_version

APPLICATION_ID = 0x5477734B
"""Stamped into the SQLite header, so that another program's database is recognised and left alone."""

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0
CHECKED_BYTES = 64 * 2**20
"""A ledger up to this size is checked whole before it is first read or written through a ``Ledger``."""

Kind = Literal["train", "serve", "bench", "generate", "calibrate", "evaluate"]
KINDS: tuple[Kind, ...] = ("train", "serve", "bench", "generate", "calibrate", "evaluate")
STATUSES = ("finished", "interrupted", "failed", "partial")

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS predictions (
        run_id TEXT PRIMARY KEY NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, frozen_at TEXT NOT NULL,
        code_version TEXT NOT NULL, fingerprint TEXT NOT NULL, inputs TEXT NOT NULL, prediction TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS measurements (
        id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL REFERENCES predictions (run_id), measured_at TEXT NOT NULL,
        status TEXT NOT NULL, measurement TEXT NOT NULL, notes TEXT)""",
    "CREATE INDEX IF NOT EXISTS measurements_of_run ON measurements (run_id)",
    *(
        f"CREATE TRIGGER IF NOT EXISTS {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
        for table in ("predictions", "measurements")
        for verb in ("UPDATE", "DELETE")
    ),
)


@dataclass(frozen=True)
class Measurement:
    """One row of what a run measured. ``values`` carry their unit in the name, as the prediction's do."""

    measured_at: str  # ISO 8601, UTC
    status: str
    values: dict[str, Any]
    notes: str | None


@dataclass(frozen=True)
class Run:
    """A frozen prediction and all that has been measured for it since."""

    DOCUMENT = "run_id kind subject status frozen_at code_version fingerprint inputs prediction measurement measurements"

    run_id: str
    kind: str
    subject: str
    frozen_at: str  # ISO 8601, UTC
    code_version: str
    fingerprint: str
    inputs: dict[str, Any]
    prediction: dict[str, Any]
    measurements: tuple[Measurement, ...] = ()

    @property
    def status(self) -> Annotated[str, "of the last measurement"]:
        """Status of the last measurement; "frozen" while there is none."""
        return self.measurements[-1].status if self.measurements else "frozen"

    @property
    def measurement(self) -> Annotated[dict[str, Any], "all measured values together"]:
        """All measured values together; where a name was measured twice, the later one."""
        merged: dict[str, Any] = {}
        for row in self.measurements:
            merged |= row.values
        return merged


def _to_json(what: str, table: Mapping[str, Any]) -> str:
    try:
        return json.dumps(plain(table), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be written to the ledger as JSON: {error}.") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Ledger:
    """The ledger in the file ``path`` (default: ``ledger.sqlite`` in Twostroke's home). The file is made by the first write;
    reading a ledger that does not exist finds no runs.

    Raises CorruptFileError where the file is damaged or belongs to another program (it is left as it is), and
    TwostrokeError where it cannot be opened or stays locked for ``BUSY_TIMEOUT_S``.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else ledger_path()
        self._checked = False

    # -- writing ---------------------------------------------------------------------------------------------------------

    def freeze(self, kind: Kind, subject: str, inputs: Mapping[str, Any], prediction: Mapping[str, Any]) -> str:
        """Store ``prediction`` with the ``inputs`` it was made from, before the work starts; return the new run's id.

        ``prediction`` maps names that end in their unit (``step_time_s``) to a number or to a dictionary with "value".
        UTC time, code version and machine fingerprint are added here.
        """
        if kind not in KINDS:
            raise ConfigError(f"kind={kind!r} is not a kind of run. {did_you_mean(str(kind), KINDS)}")
        inputs_json, prediction_json = _to_json("inputs", inputs), _to_json("prediction", prediction)
        fingerprint = read_fingerprint().key
        with self._writing() as connection:
            # Time first, so that ids sort by age; four random bytes, so that two processes in one second differ.
            run_id = f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(4).hex()}"
            connection.execute(
                "INSERT INTO predictions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (run_id, kind, str(subject), _now(), code_version(), fingerprint, inputs_json, prediction_json),
            )
        return run_id

    def measure(self, run_id: str, measurement: Mapping[str, Any], status: str = "finished", notes: str | None = None) -> None:
        """Append what run ``run_id`` measured. A number that is not finite is stored as null. Raises InputError for an
        unknown run."""
        if status not in STATUSES:
            raise ConfigError(f"status={status!r} is not known. {did_you_mean(status, STATUSES)}")
        measurement_json = _to_json("measurement", measurement)
        with self._writing() as connection:
            if connection.execute("SELECT 1 FROM predictions WHERE run_id = ?", (run_id,)).fetchone() is None:
                raise InputError(f"run {run_id!r} is not in the ledger {self.path}: freeze its prediction first.")
            connection.execute(
                "INSERT INTO measurements (run_id, measured_at, status, measurement, notes) VALUES (?, ?, ?, ?, ?)",
                (run_id, _now(), status, measurement_json, notes),
            )

    # -- reading ---------------------------------------------------------------------------------------------------------

    def get(self, run_id: str) -> Run:
        """The run whose id is ``run_id`` or, where only one does, starts with it; ``last`` is the newest.
        Raises InputError where there is none, or more than one."""
        with self._reading() as connection:
            if connection is None:
                raise InputError(f"run {run_id!r} does not exist: there is no ledger at {self.path} yet.")
            if run_id == "last":
                rows = connection.execute("SELECT * FROM predictions ORDER BY rowid DESC LIMIT 1").fetchall()
            else:
                rows = connection.execute("SELECT * FROM predictions WHERE run_id = ?", (run_id,)).fetchall()
                if not rows and run_id:
                    pattern = run_id.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
                    sql = "SELECT * FROM predictions WHERE run_id LIKE ? ESCAPE '\\' LIMIT 2"
                    rows = connection.execute(sql, (pattern,)).fetchall()
            if not rows:
                raise InputError(
                    f"run {run_id!r} is not in the ledger {self.path}. `twostroke ledger list` shows those that are."
                )
            if len(rows) > 1:
                raise InputError(
                    f"run {run_id!r} is short for more than one run, {rows[0]['run_id']} among them. Give more of it."
                )
            return self._run(connection, rows[0])

    def runs(self, kind: str | None = None, limit: int | None = None) -> list[Run]:
        """Runs, newest first, of one ``kind`` or of all, at most ``limit``."""
        if kind is not None and kind not in KINDS:
            raise ConfigError(f"kind={kind!r} is not a kind of run. {did_you_mean(kind, KINDS)}")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} must be at least 1.")
        with self._reading() as connection:
            if connection is None:
                return []
            where, values = ("WHERE kind = ?", [kind]) if kind else ("", [])
            sql = f"SELECT * FROM predictions {where} ORDER BY rowid DESC LIMIT ?"
            return [self._run(connection, row) for row in connection.execute(sql, [*values, limit or -1]).fetchall()]

    def _run(self, connection: sqlite3.Connection, row: sqlite3.Row) -> Run:
        sql = "SELECT measured_at, status, measurement, notes FROM measurements WHERE run_id = ? ORDER BY id"
        measured = connection.execute(sql, (row["run_id"],)).fetchall()
        try:
            return Run(
                run_id=row["run_id"],
                kind=row["kind"],
                subject=row["subject"],
                frozen_at=row["frozen_at"],
                code_version=row["code_version"],
                fingerprint=row["fingerprint"],
                inputs=json.loads(row["inputs"]),
                prediction=json.loads(row["prediction"]),
                measurements=tuple(
                    Measurement(m["measured_at"], m["status"], json.loads(m["measurement"]), m["notes"]) for m in measured
                ),
            )
        except ValueError as error:
            raise CorruptFileError(f"ledger {self.path}: run {row['run_id']} is not readable ({error}).") from None

    # -- the file --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """SQLite's errors as sentences."""
        try:
            yield
        except sqlite3.OperationalError as error:
            text = str(error)
            if "locked" in text or "busy" in text:
                raise TwostrokeError(
                    f"ledger {self.path} stayed locked for {BUSY_TIMEOUT_S:.0f} s. Another process holds it; try again."
                ) from None
            if "no such table" in text or "no such column" in text or "has no column" in text:
                raise self._foreign() from None
            if "full" in text or "I/O" in text:
                raise TwostrokeError(
                    f"ledger {self.path} could not be written ({text}). Make room on its disk; earlier rows are kept."
                ) from None
            if "readonly" in text or "unable to open" in text:
                raise TwostrokeError(
                    f"ledger {self.path} could not be opened ({text}). Allow writing to it and its folder, or set "
                    "TWOSTROKE_HOME to another."
                ) from None
            raise TwostrokeError(f"ledger {self.path}: {text}.") from None
        except sqlite3.IntegrityError as error:
            raise TwostrokeError(f"ledger {self.path} refused a row: {error}.") from None
        except sqlite3.DatabaseError as error:
            raise CorruptFileError(
                f"ledger {self.path} is damaged ({error}). It was left as it is; move it away to start a new one."
            ) from None

    def _foreign(self) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path} is not a Twostroke ledger. It was left as it is; name another file, or move this one away."
        )

    def _check_header(self) -> None:
        """Refuse, before SQLite opens it, a file that is no SQLite database: opened for writing it might be altered."""
        if self.path.is_dir():
            raise InputError(f"ledger {self.path} is a folder; it must be a file.")
        try:
            if self.path.is_file() and self.path.stat().st_size:
                with self.path.open("rb") as file:
                    if file.read(16) != b"SQLite format 3\0":
                        raise self._foreign()
        except OSError as error:
            raise TwostrokeError(f"ledger {self.path} cannot be read: {error.strerror}.") from None

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        # A reader opens "rw" too: a write-ahead log left by a killed writer has to be recovered before it can be read. On a
        # read-only disk or folder there can be no writer, and "immutable" reads without the files that SQLite would make.
        mode = "rw" if read_only else "rwc"
        if read_only and not (os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)):
            mode = "ro" if self.path.with_name(f"{self.path.name}-wal").exists() else "ro&immutable=1"
        uri = f"{self.path.resolve().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _is_blank(self, connection: sqlite3.Connection) -> bool:
        """True for a database without any table, such as a process killed while creating it leaves behind. Raises
        CorruptFileError where the stamp is another program's, ConfigError where it is another version's."""
        # In one statement, which sees one state: between two, another process may create the ledger.
        application, version, n_tables = connection.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
            "FROM pragma_application_id, pragma_user_version"
        ).fetchone()
        if application == APPLICATION_ID:
            if version != SCHEMA_VERSION:
                raise ConfigError(f"ledger {self.path} has version {version}; this release reads version {SCHEMA_VERSION}.")
            return False
        if application != 0 or n_tables:
            raise self._foreign()
        return True

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection inside one read transaction, or None where there is no ledger yet."""
        self._check_header()
        if not self.path.is_file() or self.path.stat().st_size == 0:
            yield None
            return
        with self._translated():
            connection = self._connect(read_only=True)
            try:
                if self._is_blank(connection):
                    yield None
                    return
                connection.execute("BEGIN")
                self._check_pages(connection)
                yield connection
            finally:
                connection.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A connection inside one write transaction, committed at the end; on any error nothing of it is kept."""
        self._check_header()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TwostrokeError(
                f"the ledger's folder {self.path.parent} cannot be made: {error.strerror}. Set TWOSTROKE_HOME to another."
            ) from None
        with self._translated():
            connection = self._connect(read_only=False)
            try:
                self._prepare(connection)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    if connection.in_transaction:  # SQLite has rolled back by itself where the disk was full
                        connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            finally:
                connection.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self._is_blank(connection):
            self._switch_to_wal(connection)
            connection.execute("BEGIN IMMEDIATE")
            # Stamp and tables appear together or not at all; a second process that waited here finds them and adds nothing.
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        else:
            self._check_pages(connection)
        connection.execute("PRAGMA synchronous = FULL")  # one row a run: a lost row costs more than an fsync

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        """Look at every page once a ``Ledger``: a query that happens to avoid a damaged page would hide rows, not fail."""
        if not self._checked and self.path.stat().st_size <= CHECKED_BYTES:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                what = " ".join(found.split())
                raise CorruptFileError(
                    f"ledger {self.path} is damaged ({what}). It was left as it is; move it away to start anew."
                )
        self._checked = True

    def _switch_to_wal(self, connection: sqlite3.Connection) -> None:
        """Switching modes does not honour the busy timeout, so two processes creating a ledger at once must try again here."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
