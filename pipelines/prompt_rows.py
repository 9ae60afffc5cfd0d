"""Rows of a prompt file, in order: the columns that say what to do, and beside them the Arrow columns that pass through."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.row_files import (
    BATCH_ROWS,
    MalformedLine,
    RowFile,
    is_unicode,
    json_lines,
    parquet_batches,
    python_values,
)

OVERRIDE_COLUMNS = (
    "mode",
    "threshold",
    "window",
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "seed",
    "stop",
)


@dataclass(frozen=True)
class PromptFile(RowFile):
    """One shard. `name` is unique in the prompt set and stands in made ids."""

    name: str


@dataclass(frozen=True)
class RawRow:
    """One row as it stands in the file. `problem` says why it could not be read; `values` has what could (nothing of a line)."""

    number: int
    location: str
    values: dict[str, Any]
    problem: str = ""


def read_chunks(file: PromptFile, columns: Sequence[str], extra: pa.Schema) -> Iterator[tuple[list[RawRow], pa.Table]]:
    """The rows of a file with those of `columns` that it has, and beside them, row by row, the Arrow columns of `extra`.

    Raises:
        InputError: the file is damaged; names it and how far it could be read.
    """
    return _parquet_chunks(file, columns, extra) if file.is_parquet else _json_chunks(file, columns, extra)


def json_rows(file: PromptFile, columns: Sequence[str]) -> Iterator[RawRow]:
    """The rows of a JSONL file with those of `columns` that each has.

    Raises:
        InputError: the file is damaged.
    """
    for number, row in json_lines(file):
        if isinstance(row, MalformedLine):
            yield RawRow(number, file.location(number), {}, row.detail)
            continue
        values = {name: row[name] for name in columns if name in row}
        if is_unicode(values):
            yield RawRow(number, file.location(number), values)
        else:
            yield RawRow(number, file.location(number), {}, "half of a surrogate pair, which is no character")


def _parquet_chunks(
    file: PromptFile, columns: Sequence[str], extra: pa.Schema
) -> Iterator[tuple[list[RawRow], pa.Table]]:
    numbers = itertools.count()
    for batch in parquet_batches(file, [*columns, *extra.names]):
        table = pa.Table.from_batches([batch])
        asked = table.select([name for name in columns if name in table.column_names])
        rows = []
        for index, values in enumerate(python_values(asked)):
            number = next(numbers)
            if isinstance(values, MalformedLine):
                rows.append(_partial_row(number, file.location(number), asked.slice(index, 1)))
            else:
                rows.append(RawRow(number, file.location(number), values))
        yield rows, table.select(extra.names).cast(extra)


def _partial_row(number: int, location: str, row: pa.Table) -> RawRow:
    """A row with the values that can be read, so that its error has its id."""
    cells = {name: python_values(row[name])[0] for name in row.column_names}
    problems = [f"{name!r}: {cell.detail}" for name, cell in cells.items() if isinstance(cell, MalformedLine)]
    values = {name: cell for name, cell in cells.items() if not isinstance(cell, MalformedLine)}
    return RawRow(number, location, values, "; ".join(problems))


def _json_chunks(file: PromptFile, columns: Sequence[str], extra: pa.Schema) -> Iterator[tuple[list[RawRow], pa.Table]]:
    rows = json_rows(file, list(dict.fromkeys([*columns, *extra.names])))
    while chunk := list(itertools.islice(rows, BATCH_ROWS)):
        arrays = [pa.array([row.values.get(field.name) for row in chunk], field.type) for field in extra]
        yield chunk, pa.Table.from_arrays(arrays, schema=extra)
