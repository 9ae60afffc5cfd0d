"""Rows of a prompt file, read as a stream and in order: Parquet or JSONL, plain, gzip or Zstandard.

A line of JSONL that holds only blanks is not a row. Rows count from 0 in both formats; locations name the line, from 1, of
a JSONL file and the row, from 0, of a Parquet file. Memory is bounded by a thousand lines, or by a few pages of each Parquet
column.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from workers.errors import InputError

OVERRIDE_COLUMNS = ("mode", "threshold", "window", "max_new_tokens", "temperature", "seed", "stop")
_BATCH_ROWS = 1024
_MAX_LINE_BYTES = 64 << 20
_COLUMN_BUFFER_BYTES = 1 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class PromptFile:
    """One shard. `name` is unique in the prompt set and stands in made ids."""

    path: str
    size: int
    name: str

    @property
    def is_parquet(self) -> bool:
        """Parquet, or else JSONL."""
        return self.path.lower().endswith(".parquet")


@dataclass(frozen=True)
class RawRow:
    """One row as it stands in the file. `problem` says why a line could not be read; `values` is then empty."""

    location: str
    values: dict[str, Any]
    problem: str = ""


def read_chunks(file: PromptFile, columns: Sequence[str], extra: pa.Schema) -> Iterator[tuple[list[RawRow], pa.Table]]:
    """The rows of a file with those of `columns` that it has, and beside them, row by row, the Arrow columns of `extra`.

    Raises:
        InputError: the file is damaged; names it and how far it could be read.
    """
    return _parquet_chunks(file, columns, extra) if file.is_parquet else _json_chunks(file, columns, extra)


def parquet_schema(file: PromptFile) -> tuple[pa.Schema, int]:
    """Schema and number of rows, from the file's footer.

    Raises:
        InputError: not a Parquet file.
    """
    with storage.open_read(file.path) as stream:
        try:
            parquet = pq.ParquetFile(stream)
        except pa.ArrowException as error:
            raise _damaged(file, "its footer", error) from error
        return parquet.schema_arrow, parquet.metadata.num_rows


def parquet_batches(file: PromptFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file with the given columns, all of which it must have.

    Raises:
        InputError: the file is damaged.
    """
    with storage.open_read(file.path) as stream:
        num_read = 0
        try:
            # Without pre_buffer and with a buffer size, a large row group is read page by page and not as a whole.
            parquet = pq.ParquetFile(stream, pre_buffer=False, buffer_size=_COLUMN_BUFFER_BYTES)
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False):
                yield batch
                num_read += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _damaged(file, f"row {num_read}", error) from error


def _parquet_chunks(
    file: PromptFile, columns: Sequence[str], extra: pa.Schema
) -> Iterator[tuple[list[RawRow], pa.Table]]:
    schema, _ = parquet_schema(file)
    present = [name for name in columns if name in schema.names]
    row = 0
    for batch in parquet_batches(file, list(dict.fromkeys([*present, *extra.names]))):
        table = pa.Table.from_batches([batch])
        values = table.select(present).to_pylist()
        rows = [RawRow(f"{file.path} row {row + index}", value) for index, value in enumerate(values)]
        yield rows, table.select(extra.names).cast(extra)
        row += batch.num_rows


def _json_chunks(file: PromptFile, columns: Sequence[str], extra: pa.Schema) -> Iterator[tuple[list[RawRow], pa.Table]]:
    rows = json_rows(file, list(dict.fromkeys([*columns, *extra.names])))
    while chunk := list(itertools.islice(rows, _BATCH_ROWS)):
        arrays = [pa.array([row.values.get(field.name) for row in chunk], field.type) for field in extra]
        yield chunk, pa.Table.from_arrays(arrays, schema=extra)


def json_rows(file: PromptFile, columns: Sequence[str]) -> Iterator[RawRow]:
    """The rows of a JSONL file with those of `columns` that each has.

    Raises:
        InputError: the file is damaged.
    """
    number = 0
    with storage.open_input(file.path) as stream:
        try:
            for number, line in enumerate(_lines(stream), start=1):
                if line.strip():
                    yield _json_row(f"{file.path} line {number}", line, columns)
        except (OSError, EOFError, pa.ArrowException) as error:
            raise _damaged(file, f"line {number + 1}", error) from error


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines of a binary stream; one without end stops at a limit instead of filling the memory."""
    while line := stream.readline(_MAX_LINE_BYTES):
        if len(line) == _MAX_LINE_BYTES:
            raise OSError(f"longer than {_MAX_LINE_BYTES >> 20} MiB")
        yield line


def _json_row(location: str, line: bytes, columns: Sequence[str]) -> RawRow:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RawRow(location, {}, f"not JSON: {error}")
    if not isinstance(values, dict):
        return RawRow(location, {}, f"a JSON {type(values).__name__}, not an object")
    kept = {name: values[name] for name in columns if name in values}
    if _SURROGATE.search(line):
        try:
            json.dumps(kept, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return RawRow(location, {}, "half of a surrogate pair, which is no character")
    return RawRow(location, kept)


def _damaged(file: PromptFile, where: str, error: Exception) -> InputError:
    kind = "Parquet" if file.is_parquet else "JSONL"
    found = f"unreadable from {where} on: {error}"
    return InputError(file.path, found, f"a whole {kind} file", "Write the file again.")
