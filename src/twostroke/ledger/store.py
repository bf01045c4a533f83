"""The ledger stores predictions that are frozen before a run, and the run's measurements, in one append-only SQLite file.

It has two tables. ``predictions`` has one row for each run, ``measurements`` any number of rows for each run. Triggers refuse
UPDATE and DELETE, so rows are never changed or removed. Several processes may write at once (write-ahead log,
``BEGIN IMMEDIATE``, a busy timeout), and a killed process loses at most the row that it was writing.
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
from typing import Annotated, Any, Literal, get_args

from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, CorruptFileError, InputError, TwostrokeError, did_you_mean
from twostroke.core.paths import ledger_path
from twostroke.core.profile import read_fingerprint
from twostroke.ledger.code_version import code_version

APPLICATION_ID = 0x5477734B
"""Written into the SQLite header, so that another program's database is recognised and not changed."""

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0
CHECKED_BYTES = 64 * 2**20
"""Up to this size, a ``Ledger`` checks the whole file before it first reads or writes it."""

Kind = Literal[
    "train",
    "sweep",
    "serve",
    "bench",
    "generate",
    "batch",
    "calibrate",
    "evaluate",
    "prepare",
    "quantize",
    "import",
    "export",
    "score",
    "exits",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
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
    """One row of a run's measurements. The names of ``values`` end in their unit, as those of the prediction do."""

    measured_at: str  # ISO 8601, UTC
    status: str
    values: dict[str, Any]
    notes: str | None


@dataclass(frozen=True)
class Run:
    """A frozen prediction and its measurements so far."""

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
        """The status of the last measurement; "frozen" before the first."""
        return self.measurements[-1].status if self.measurements else "frozen"

    @property
    def measurement(self) -> Annotated[dict[str, Any], "all measured values together"]:
        """All measured values in one table. If a name was measured twice, the later value counts."""
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
    """The ledger in the file ``path`` (default: ``ledger.sqlite`` in Twostroke's home). The first write creates the file;
    before that, reading finds no runs.

    Raises CorruptFileError if the file is damaged or belongs to another program (the file is not changed), and TwostrokeError
    if it cannot be opened or stays locked for ``BUSY_TIMEOUT_S``.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else ledger_path()
        self._checked = False

    # -- writing ---------------------------------------------------------------------------------------------------------

    def freeze(self, kind: Kind, subject: str, inputs: Mapping[str, Any], prediction: Mapping[str, Any]) -> str:
        """Store ``prediction`` and the ``inputs`` that it was made from, before the work starts. Returns the new run's id.

        ``prediction`` maps names that end in their unit (``step_time_s``) to a number or to a dictionary with "value". The
        ledger adds UTC time, code version and machine fingerprint.
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
        """Append measurements to run ``run_id``. A number that is not finite is stored as null. Raises InputError for an
        unknown run."""
        if status not in STATUSES:
            raise ConfigError(f"status={status!r} is not a status of a run. {did_you_mean(status, STATUSES)}")
        measurement_json = _to_json("measurement", measurement)
        with self._writing() as connection:
            if connection.execute("SELECT 1 FROM predictions WHERE run_id = ?", (run_id,)).fetchone() is None:
                raise InputError(f"run {run_id!r} is not in the ledger {self.path}. Call freeze() with its prediction first.")
            connection.execute(
                "INSERT INTO measurements (run_id, measured_at, status, measurement, notes) VALUES (?, ?, ?, ?, ?)",
                (run_id, _now(), status, measurement_json, notes),
            )

    # -- reading ---------------------------------------------------------------------------------------------------------

    def get(self, run_id: str) -> Run:
        """The run with the id ``run_id``, or the only one whose id starts with it. ``last`` is the newest run.
        Raises InputError if no run or more than one matches."""
        with self._reading() as connection:
            if connection is None:
                raise InputError(
                    f"run {run_id!r} does not exist, because there is no ledger at {self.path} yet. The first run creates one."
                )
            if run_id == "last":
                rows = connection.execute("SELECT * FROM predictions ORDER BY rowid DESC LIMIT 1").fetchall()
            else:
                rows = connection.execute("SELECT * FROM predictions WHERE run_id = ?", (run_id,)).fetchall()
                if not rows and run_id:
                    pattern = run_id.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
                    sql = "SELECT * FROM predictions WHERE run_id LIKE ? ESCAPE '\\' LIMIT 2"
                    rows = connection.execute(sql, (pattern,)).fetchall()
            if not rows:
                raise InputError(f"run {run_id!r} is not in the ledger {self.path}. `twostroke ledger list` shows its runs.")
            if len(rows) > 1:
                raise InputError(
                    f"{run_id!r} is the beginning of more than one run's id, such as {rows[0]['run_id']}. Give more of the id."
                )
            return self._run(connection, rows[0])

    def runs(self, kind: str | None = None, limit: int | None = None) -> list[Run]:
        """At most ``limit`` runs, newest first, of one ``kind`` or of all."""
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
            raise CorruptFileError(
                f"ledger {self.path} is damaged: run {row['run_id']} cannot be read ({error}). Move it away to start a new "
                "ledger."
            ) from None

    # -- the file --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn SQLite's errors into sentences."""
        try:
            yield
        except sqlite3.OperationalError as error:
            text = str(error)
            if "locked" in text or "busy" in text:
                raise TwostrokeError(
                    f"ledger {self.path} stayed locked for {BUSY_TIMEOUT_S:.0f} s by another process. Try again when that has "
                    "ended."
                ) from None
            if "no such table" in text or "no such column" in text or "has no column" in text:
                raise self._foreign() from None
            if "full" in text or "I/O" in text:
                raise TwostrokeError(
                    f"ledger {self.path} could not be written ({text}). Free space on its disk; earlier rows are kept."
                ) from None
            if "readonly" in text or "unable to open" in text:
                raise TwostrokeError(
                    f"ledger {self.path} could not be opened ({text}). Allow writing to it and its folder, or set "
                    "TWOSTROKE_HOME to another folder."
                ) from None
            raise TwostrokeError(f"ledger {self.path}: {text}.") from None
        except sqlite3.IntegrityError as error:
            raise TwostrokeError(f"ledger {self.path} refused a row: {error}.") from None
        except sqlite3.DatabaseError as error:
            raise CorruptFileError(
                f"ledger {self.path} is damaged ({error}). The file was not changed; move it away to start a new ledger."
            ) from None

    def _foreign(self) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path} is not a Twostroke ledger. The file was not changed; name another one, or move this one away."
        )

    def _check_header(self) -> None:
        """Refuse a file that is not an SQLite database before SQLite opens it, because opening it for writing may change it."""
        if self.path.is_dir():
            raise InputError(f"ledger {self.path} is a folder; it must be a file. Name a file in it.")
        try:
            if self.path.is_file() and self.path.stat().st_size:
                with self.path.open("rb") as file:
                    if file.read(16) != b"SQLite format 3\0":
                        raise self._foreign()
        except OSError as error:
            raise TwostrokeError(f"ledger {self.path} cannot be read: {error.strerror}.") from None

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        # A reader opens "rw" too, because it must recover the write-ahead log that a killed writer left. A read-only file or
        # folder has no writers, and "immutable" lets SQLite read it without creating files beside it.
        mode = "rw" if read_only else "rwc"
        if read_only and not (os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)):
            mode = "ro" if self.path.with_name(f"{self.path.name}-wal").exists() else "ro&immutable=1"
        uri = f"{self.path.resolve().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _is_blank(self, connection: sqlite3.Connection) -> bool:
        """True for a database without tables, which a process leaves that was killed while it created the ledger.
        Raises CorruptFileError for another program's database, ConfigError for a ledger of another version."""
        # One statement sees one state. Between two statements another process could create the ledger.
        application, version, n_tables = connection.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
            "FROM pragma_application_id, pragma_user_version"
        ).fetchone()
        if application == APPLICATION_ID:
            if version != SCHEMA_VERSION:
                raise ConfigError(
                    f"ledger {self.path} has version {version}, and this release reads version {SCHEMA_VERSION}. "
                    "Use the release that wrote it, or set TWOSTROKE_HOME to another folder."
                )
            return False
        if application != 0 or n_tables:
            raise self._foreign()
        return True

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection inside one read transaction; None if the ledger does not exist yet."""
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
        """A connection inside one write transaction, which is committed at the end and rolled back on any error."""
        self._check_header()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TwostrokeError(
                f"the ledger's folder {self.path.parent} cannot be made: {error.strerror}. Set TWOSTROKE_HOME to another "
                "folder."
            ) from None
        with self._translated():
            connection = self._connect(read_only=False)
            try:
                self._prepare(connection)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    if connection.in_transaction:  # if the disk was full, SQLite has rolled back by itself
                        connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            finally:
                connection.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self._is_blank(connection):
            self._switch_to_wal(connection)
            connection.execute("BEGIN IMMEDIATE")
            # Tables and header appear in one transaction. A second process that waited here finds them and changes nothing.
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        else:
            self._check_pages(connection)
        connection.execute("PRAGMA synchronous = FULL")  # an fsync costs little for one row a run, and no row is lost

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        """Check every page of the file, once for each ``Ledger``. A query may miss the rows of a damaged page without an
        error."""
        if not self._checked and self.path.stat().st_size <= CHECKED_BYTES:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                what = " ".join(found.split())
                raise CorruptFileError(
                    f"ledger {self.path} is damaged ({what}). The file was not changed; move it away to start a new ledger."
                )
        self._checked = True

    def _switch_to_wal(self, connection: sqlite3.Connection) -> None:
        """Switch to the write-ahead log. SQLite's busy timeout does not apply to that, so if two processes create a ledger at
        once, one retries here."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
