"""Raw SFT shards: which there are, for which entry of `data.train`, and their rows as a stream (see `row_files`)."""

import functools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipelines import storage
from pipelines.row_files import (
    MalformedLine,
    RowFile,
    RowRange,
    is_unicode,
    json_lines,
    list_row_files,
    parquet_batches,
    python_values,
)
from pipelines.shard_columns import differences, inspect_columns
from workers.config import DataSettings
from workers.errors import InputError

Shard = RowFile
NUM_INSPECTION_THREADS = 8
_logger = logging.getLogger(__name__)


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
    names: dict[str, str] = {}  # of a file with several, the one that `list_shards` gives it
    for number, path in enumerate(paths):
        for shard in list_shards([path], where):
            file = storage.real_path(shard.path)
            names[file] = min(shard.path, names.get(file, shard.path))
            owner = owners.setdefault(file, number)
            if weights and owner != number:
                raise InputError(
                    "data.weights",
                    f"{shard.path}, which both {paths[owner]!r} and {path!r} reach",
                    f"each shard behind one entry of {where}, so that it has one weight",
                    "Let the folders or globs exclude each other.",
                )
    return tuple(
        Source(path, weight, tuple(sorted(names[file] for file, owner in owners.items() if owner == number)))
        for number, (path, weight) in enumerate(zip(paths, exact, strict=True))
    )


def inspect_shards(
    settings: DataSettings,
    paths: Sequence[str] | None = None,
    where: str = "data.train",
    *,
    log_differences: bool = False,
) -> tuple[Shard, ...]:
    """Lists the shards (of `settings.train` if no other paths are given) and checks each one's columns; reads first rows only.

    With `log_differences`, a table says which shards have which columns when not all have the same.

    Raises:
        InputError: as `list_shards` and `inspect_columns`.
    """
    shards = list_shards(settings.train if paths is None else paths, where)
    with ThreadPoolExecutor(NUM_INSPECTION_THREADS) as pool:
        columns = list(pool.map(functools.partial(inspect_columns, settings=settings), shards))
    table = differences(shards, columns)
    if log_differences and table is not None:
        _logger.info("the shards of %s differ in their columns:\n%s", where, table.rstrip())
    return shards


def iterate_rows(
    shard: Shard, settings: DataSettings, rows: RowRange | None = None
) -> Iterator[tuple[int, dict[str, Any] | MalformedLine]]:
    """The rows of a shard (or of a range of it) in order, each with its number and those of the configured columns it has.

    Raises:
        InputError: the file is damaged; names the row up to which it could be read.
    """
    configured = (settings.messages_column, settings.prompt_column, settings.response_column)
    if shard.is_parquet:
        values = (row for batch in parquet_batches(shard, configured, rows) for row in python_values(batch))
        yield from enumerate(values, start=rows.first_row if rows else 0)
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
            messages = row.get(settings.messages_column)
            if messages is not None:
                messages = messages if isinstance(messages, list) else []
                texts = [message.get("content") for message in messages if isinstance(message, dict)]
            else:
                texts = [row.get(settings.prompt_column), row.get(settings.response_column)]
            yield from (text for text in texts if isinstance(text, str) and is_unicode(text))
