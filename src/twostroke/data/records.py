"""Reads the records of .json, .jsonl and .parquet files and of data sets, compressed or not, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from twostroke.core.errors import DataError
from twostroke.data.hub_datasets import dataset_columns
from twostroke.data.source_files import SourceFile, check_unchanged

MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a .jsonl file. A line is held in memory whole, so memory would not be bounded without this."""

MAX_JSON_BYTES = 2**31
"""Longest .json file, because its array is parsed whole. A .jsonl file of any length is read line by line."""

_PARQUET_ROWS = 256
"""Rows that are turned into Python objects at once. The format still decompresses a whole row group at a time."""


def open_file(path: str) -> IO[bytes]:
    """Open ``path`` for reading. If its name ends in .gz or .zst, it is decompressed."""
    lowered = path.lower()
    if lowered.endswith(".gz"):
        stream: Any = gzip.open(path, "rb")  # noqa: SIM115 - for callers that close it
        return stream
    return _open_zst(path) if lowered.endswith(".zst") else open(path, "rb")


def _open_zst(path: str) -> IO[bytes]:
    """Open a zstd file with the standard library's reader (from Python 3.14) or else with pyarrow's."""
    try:
        from compression import zstd
    except ImportError:
        pass
    else:
        stream: IO[bytes] = zstd.open(path, "rb")
        return stream
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{path} is compressed with zstd. Install the library that reads it: pip install 'twostroke[train]'."
        ) from None
    with open(path, "rb"):
        pass  # raises the system's own error if the file cannot be opened; pyarrow's names no reason
    decompressed: Any = io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return decompressed


@contextmanager
def reading(file: SourceFile) -> Iterator[None]:
    """Turn errors of reading ``file`` into a DataError that names it. If the file changed meanwhile, the error says that."""
    try:
        yield
    except DataError:
        check_unchanged([file])
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file.path} is not a whole gzip file: {error}. Copy or download it again.") from None
    except OSError as error:
        if error.errno is None and file.path.lower().endswith(".zst"):
            raise DataError(f"{file.path} is not a whole zstd file: {error}. Copy or download it again.") from None
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}.") from None


def is_table(file: SourceFile) -> bool:
    """Whether records are rows of named columns, read by column, instead of lines or arrays of JSON."""
    return file.dataset is not None or file.path.lower().endswith(".parquet")


def read_lines(file: SourceFile) -> Iterator[tuple[int, str, bytes]]:
    """(number from 1, place for error messages, line) of each line that is not blank."""
    with open_file(file.path) as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{file.path} line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{where} is longer than {MAX_LINE_BYTES} bytes. A .jsonl file holds one record a line.")
            if line.strip():
                yield number, where, line


def parse_json(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"{where} is not valid JSON: {error}. Correct it, or leave the file out.") from None


def read_array(file: SourceFile) -> Iterator[tuple[int, str, Any]]:
    """The records of a .json file."""
    if file.n_bytes > MAX_JSON_BYTES:
        raise DataError(f"{file.path} is longer than {MAX_JSON_BYTES} bytes. Write it as .jsonl, a record a line.")
    content = Path(file.path).read_bytes()
    if not content.strip():
        raise DataError(f"{file.path} is empty. Leave it out, or write a JSON array of records.")
    records = parse_json(content, file.path)
    if not isinstance(records, list):
        raise DataError(f"{file.path} must hold a JSON array of records. A file of one record a line is named .jsonl.")
    for number, record in enumerate(records, start=1):
        yield number, f"{file.path} record {number}", record


def table_columns(file: SourceFile) -> list[str]:
    """The names of a table's columns. Raises DataError if it is damaged."""
    if file.dataset is not None:
        return list(file.dataset.column_names)
    with _parquet(file) as table:
        return list(table.schema_arrow.names)


def read_table(file: SourceFile, columns: Sequence[str]) -> Iterator[tuple[int, str, list[Any]]]:
    """(number from 1, place for error messages, values of ``columns``) of each row. No other column is read from the disk."""
    if file.dataset is not None:
        try:
            for number, values in dataset_columns(file.dataset, columns):
                yield number, f"{file.path} row {number}", values
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"data set {file.path} cannot be read: {' '.join(str(error).split())}.") from None
        return
    number = 0
    with _parquet(file) as table:
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=list(columns), use_threads=False):
            for row in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                number += 1
                yield number, f"{file.path} row {number}", list(row)


@contextmanager
def _parquet(file: SourceFile) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{file.path} is a parquet file. Install the library that reads it: pip install 'twostroke[train]'."
        ) from None
    try:
        with open(file.path, "rb") as stream, parquet.ParquetFile(stream, page_checksum_verification=True) as table:
            yield table
    except pyarrow.lib.ArrowException as error:
        raise DataError(f"{file.path} is not a whole parquet file: {' '.join(str(error).split())}") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{file.path} is not a whole parquet file: {' '.join(str(error).split())}") from None
