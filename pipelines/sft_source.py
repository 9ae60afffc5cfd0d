"""Raw SFT shards: which there are, whether they have the right columns, and their rows as a stream.

A shard is a Parquet file, or JSONL that is plain or compressed (.gz, .zst). Rows are counted from 0 in each file; in
JSONL a row's number is that of its line, blank lines included, so a location can be found again with any editor.
"""

import functools
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from workers.config import DataSettings
from workers.errors import InputError

SHARD_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
# Rows of a JSONL shard that are looked at for its columns, rows of a Parquet batch, bytes of a Parquet column read at a time, and
# the longest line that is still taken for a row.
INSPECTED_ROWS = 20
BATCH_ROWS = 256
COLUMN_BUFFER_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
NUM_INSPECTION_THREADS = 8

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """One input file. `version` changes when its content does."""

    path: str
    size: int
    version: str

    @property
    def is_parquet(self) -> bool:
        """Parquet, or else JSONL."""
        return self.path.lower().endswith(".parquet")


@dataclass(frozen=True)
class MalformedLine:
    """Stands for a line of JSONL that is not a row."""

    detail: str


def list_shards(paths: Sequence[str], where: str = "data.train") -> tuple[Shard, ...]:
    """The shards of files, folders and globs: sorted by path, each once. `where` is the setting that names them.

    Raises:
        InputError: nothing named, a missing file, a folder or glob without shards, a file of another kind, an empty
        file.
    """
    if not paths:
        raise InputError(where, "no path", "at least one file, folder or glob")
    found = {info.path: info for path in paths for info in _expand(path, where)}
    for path in sorted(found):
        if not found[path].size:
            raise InputError(path, "an empty file (0 bytes)", "a shard with rows", "Remove it or write it again.")
    return tuple(Shard(path, found[path].size, found[path].version) for path in sorted(found))


def inspect_shards(
    settings: DataSettings, paths: Sequence[str] | None = None, where: str = "data.train"
) -> tuple[Shard, ...]:
    """Lists the shards (of `settings.train` if no other paths are given) and checks each one's schema; reads first rows only.

    Raises:
        InputError: as `list_shards`; an unreadable Parquet file, a shard without rows, a shard without the right
        columns.
    """
    shards = list_shards(settings.train if paths is None else paths, where)
    with ThreadPoolExecutor(NUM_INSPECTION_THREADS) as pool:
        for _ in pool.map(functools.partial(_inspect, settings=settings), shards):
            pass
    return shards


def iterate_rows(shard: Shard, settings: DataSettings) -> Iterator[tuple[int, dict[str, Any] | MalformedLine]]:
    """The rows of a shard in order, each with its number and those of the configured columns that it has.

    Memory is bounded by one line, or by a few pages of a Parquet column.

    Raises:
        InputError: the file is damaged; names the row up to which it could be read.
    """
    yield from _parquet_rows(shard, settings) if shard.is_parquet else _json_rows(shard, settings)


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
            yield from (text for text in texts if isinstance(text, str) and _is_unicode(text))


def has_columns(names: Sequence[str] | dict[str, Any], settings: DataSettings) -> bool:
    """Whether a row with these columns is a conversation, or a prompt and a response."""
    return settings.messages_column in names or (settings.prompt_column in names and settings.response_column in names)


def _expand(path: str, where: str) -> list[storage.FileInfo]:
    if not storage.is_s3(path):
        path = os.path.abspath(path)
    single = storage.find_file(path)
    if single is not None:
        if not path.lower().endswith(SHARD_SUFFIXES):
            raise InputError(where, f"the file {path}", f"a name that ends in {' or '.join(SHARD_SUFFIXES)}")
        return [single]
    is_glob = any(character in path for character in "*?[")
    found = storage.list_glob(path) if is_glob else storage.list_folder(path)
    # Names that begin with `_` are side files (`_errors/`, `_SUCCESS`), in a folder and behind the fixed part of a glob.
    start = len(re.split(r"[*?\[]", path, maxsplit=1)[0])
    shards = [i for i in found if i.path.lower().endswith(SHARD_SUFFIXES) and "/_" not in i.path[start:]]
    if not shards:
        missing = not found and not is_glob and not storage.exists(path)
        kind = "nothing at" if missing else "no shard that matches" if is_glob else "no shard in the folder"
        expected = f"files that end in {' or '.join(SHARD_SUFFIXES)}"
        raise InputError(where, f"{kind} {path}", expected, "Relative paths are resolved before this check.")
    if len(shards) < len(found):
        _logger.info("%s: %d of %d files below %s are shards", where, len(shards), len(found), path)
    return shards


def _inspect(shard: Shard, settings: DataSettings) -> None:
    if shard.is_parquet:
        with storage.open_read(shard.path) as file:
            parquet = _open_parquet(shard, file)
            if not parquet.metadata.num_rows:
                raise InputError(shard.path, "a Parquet file without rows", "a shard with rows", "Remove it.")
            _check_parquet_types(shard, parquet.schema_arrow, settings)
        return
    rows = [row for _, row in itertools.islice(_json_lines(shard), INSPECTED_ROWS)]
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


def _open_parquet(shard: Shard, file: Any) -> pq.ParquetFile:
    try:
        # Without pre_buffer and with a buffer size, a large row group is read page by page and not as a whole.
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=COLUMN_BUFFER_BYTES)
    except pa.ArrowException as error:
        raise InputError(shard.path, f"not a readable Parquet file ({error})", "a whole Parquet file") from error


def _parquet_rows(shard: Shard, settings: DataSettings) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    with storage.open_read(shard.path) as file:
        parquet = _open_parquet(shard, file)
        configured = (settings.messages_column, settings.prompt_column, settings.response_column)
        columns = [name for name in configured if name in parquet.schema_arrow.names]
        try:
            for batch in parquet.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
        except (pa.ArrowException, OSError) as error:
            raise _damaged(shard, f"row {number}", error) from error


def _json_rows(shard: Shard, settings: DataSettings) -> Iterator[tuple[int, dict[str, Any] | MalformedLine]]:
    configured = (settings.messages_column, settings.prompt_column, settings.response_column)
    for number, row in _json_lines(shard):
        if isinstance(row, MalformedLine):
            yield number, row
        else:
            yield number, {name: row[name] for name in configured if name in row}


def _json_lines(shard: Shard) -> Iterator[tuple[int, dict[str, Any] | MalformedLine]]:
    number = 0
    with storage.open_input(shard.path) as file:
        try:
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES:
                    raise OSError(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
                if line.strip():
                    yield number, _parse_line(line)
                number += 1
        except (pa.ArrowException, OSError, EOFError) as error:
            raise _damaged(shard, f"line {number + 1}", error) from error


def _parse_line(line: bytes) -> dict[str, Any] | MalformedLine:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        return MalformedLine(str(error))
    return row if isinstance(row, dict) else MalformedLine(f"a JSON {type(row).__name__}, not an object")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _damaged(shard: Shard, position: str, error: Exception) -> InputError:
    found = f"unreadable from {position} on ({error})"
    return InputError(shard.path, found, "a whole file", "Write the file again.")
