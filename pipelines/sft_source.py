"""Raw SFT shards: whether they have the right columns, and their rows as a stream. Files and rows are those of `row_files`."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pyarrow as pa

from pipelines.row_files import (
    MalformedLine,
    RowFile,
    is_unicode,
    json_lines,
    list_row_files,
    parquet_batches,
    parquet_schema,
    python_values,
)
from workers.config import DataSettings
from workers.errors import InputError

Shard = RowFile
INSPECTED_ROWS = 20  # of a JSONL shard, for its columns
NUM_INSPECTION_THREADS = 8


def list_shards(paths: Sequence[str], where: str = "data.train") -> tuple[Shard, ...]:
    """The shards of files, folders and globs: sorted by path, each once. `where` is the setting that names them.

    Raises:
        InputError: as `list_row_files`.
    """
    return list_row_files(paths, where)


@dataclass(frozen=True)
class Source:
    """One entry of `data.train`, its weight, and the paths of its shards."""

    path: str
    weight: Fraction
    files: tuple[str, ...]


def list_sources(paths: Sequence[str], weights: Sequence[float], where: str = "data.train") -> tuple[Source, ...]:
    """The entries `paths` with their weights, 1 when there are none. A shard belongs to the first entry that reaches it.

    Raises:
        InputError: as `list_shards`; with weights, a shard that two entries reach.
    """
    # As typed: 0.1 is one tenth, not the binary fraction beside it.
    exact = [Fraction(str(weight)) for weight in weights] or [Fraction(1)] * len(paths)
    owners: dict[str, int] = {}
    for number, path in enumerate(paths):
        for shard in list_shards([path], where):
            owner = owners.setdefault(shard.path, number)
            if weights and owner != number:
                raise InputError(
                    "data.weights",
                    f"{shard.path}, which both {paths[owner]!r} and {path!r} reach",
                    f"each shard behind one entry of {where}, so that it has one weight",
                    "Let the folders or globs exclude each other.",
                )
    return tuple(
        Source(path, weight, tuple(sorted(file for file, owner in owners.items() if owner == number)))
        for number, (path, weight) in enumerate(zip(paths, exact, strict=True))
    )


def inspect_shards(
    settings: DataSettings, paths: Sequence[str] | None = None, where: str = "data.train"
) -> tuple[Shard, ...]:
    """Lists the shards (of `settings.train` if no other paths are given) and checks each one's schema; reads first rows only.

    Raises:
        InputError: as `list_shards` and `parquet_schema`; a shard without rows, a shard without the right
        columns.
    """
    shards = list_shards(settings.train if paths is None else paths, where)
    with ThreadPoolExecutor(NUM_INSPECTION_THREADS) as pool:
        for _ in pool.map(functools.partial(_inspect, settings=settings), shards):
            pass
    return shards


def iterate_rows(shard: Shard, settings: DataSettings) -> Iterator[tuple[int, dict[str, Any] | MalformedLine]]:
    """The rows of a shard in order, each with its number and those of the configured columns that it has.

    Raises:
        InputError: the file is damaged; names the row up to which it could be read.
    """
    configured = (settings.messages_column, settings.prompt_column, settings.response_column)
    if shard.is_parquet:
        batches = parquet_batches(shard, configured)
        yield from enumerate(row for batch in batches for row in python_values(batch))
        return
    for number, row in json_lines(shard):
        if isinstance(row, MalformedLine):
            yield number, row
        else:
            yield number, {name: row[name] for name in configured if name in row}


def iterate_texts(settings: DataSettings) -> Iterator[str]:
    """All texts of `settings.train`: contents of messages, or prompts and responses. What is no text is passed over.

    Raises:
        InputError: as `list_shards` and `iterate_rows`.
    """
    for shard in list_shards(settings.train):
        for _, row in iterate_rows(shard, settings):
            if isinstance(row, MalformedLine):
                continue
            if settings.messages_column in row:
                messages = row[settings.messages_column]
                messages = messages if isinstance(messages, list) else []
                texts = [message.get("content") for message in messages if isinstance(message, dict)]
            else:
                texts = [row.get(settings.prompt_column), row.get(settings.response_column)]
            yield from (text for text in texts if isinstance(text, str) and is_unicode(text))


def has_columns(names: Sequence[str] | dict[str, Any], settings: DataSettings) -> bool:
    """Whether a row with these columns is a conversation, or a prompt and a response."""
    return settings.messages_column in names or (settings.prompt_column in names and settings.response_column in names)


def _inspect(shard: Shard, settings: DataSettings) -> None:
    if shard.is_parquet:
        schema, num_rows = parquet_schema(shard)
        if not num_rows:
            raise InputError(shard.path, "a Parquet file without rows", "a shard with rows", "Remove it.")
        _check_parquet_types(shard, schema, settings)
        return
    rows = [row for _, row in itertools.islice(json_lines(shard), INSPECTED_ROWS)]
    if not rows:
        raise InputError(shard.path, "a file of blank lines", "a shard with rows", "Remove it.")
    objects = [row for row in rows if not isinstance(row, MalformedLine)]
    # A few bad lines are rejected rows, and are counted later. A shard in which no row has the columns is a wrong setting.
    if objects and not any(has_columns(row, settings) for row in objects):
        raise _wrong_columns(shard, sorted({str(name) for row in objects for name in row}), settings)


def _check_parquet_types(shard: Shard, schema: pa.Schema, settings: DataSettings) -> None:
    if not has_columns(schema.names, settings):
        raise _wrong_columns(shard, schema.names, settings)
    if settings.messages_column in schema.names:
        kind = schema.field(settings.messages_column).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        fields = [field.name for field in kind.value_type] if is_list and pa.types.is_struct(kind.value_type) else []
        if not {"role", "content"} <= set(fields):
            expected = "a list of {role, content}; data.messages_column says which column has it"
            raise InputError(f"{shard.path} column {settings.messages_column!r}", str(kind), expected)


def _wrong_columns(shard: Shard, names: Sequence[str], settings: DataSettings) -> InputError:
    return InputError(
        shard.path,
        f"the columns {', '.join(names)}",
        f"{settings.messages_column!r}, or {settings.prompt_column!r} and {settings.response_column!r}",
        "Name the columns with data.messages_column, or data.prompt_column and data.response_column.",
    )
