"""Files of rows, which SFT shards and prompt sets both are: which there are, and their rows as a stream and in order.

A file of rows is Parquet, or JSONL that is plain or compressed. The rules, the same for everybody who reads one:

- In folders and behind globs, files and folders whose names begin with `_` or `.` are side files (`_errors/`, `_SUCCESS`) and
  are left out, unless the path itself spells such a name.
- Rows are numbered from 0. In JSONL a row's number is that of its line: a line of blanks is no row, but it counts. Locations
  name the row, from 0, of a Parquet file and the line, from 1, of a JSONL file, so any editor finds it.
- A line that is no JSON object, is longer than `MAX_LINE_BYTES` or nests deeper than `MAX_DEPTH`, and a row of Parquet that
  has no Python value (text that is no UTF-8, a date that no calendar has), are malformed rows; the rows after them are read.
- A file of 0 bytes, one that breaks off, JSONL in UTF-16, and one that has two columns of one name are refused by name.
"""

import codecs
import fnmatch
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from workers.errors import InputError

_PACKINGS = ("", *storage.COMPRESSIONS)
SUFFIXES = (".parquet", *(f"{kind}{packing}" for kind in (".jsonl", ".ndjson") for packing in _PACKINGS))
_DOCUMENT_SUFFIXES = tuple(f".json{packing}" for packing in _PACKINGS)
# Rows that are in memory at once, bytes of a Parquet column read at a time, and the longest line that is taken for a row.
BATCH_ROWS = 256
COLUMN_BUFFER_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
MAX_DEPTH = 100  # what is deeper can be parsed, but not always pickled

_TO_UTF_8 = "Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, "{".encode("utf-16-le"), "{".encode("utf-16-be"))

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowFile:
    """One input file. `version` changes when its content does."""

    path: str
    size: int
    version: str

    @property
    def is_parquet(self) -> bool:
        """Parquet, or else JSONL."""
        return self.path.lower().endswith(".parquet")

    def position(self, row: int) -> str:
        """Where in the file a row is."""
        return f"row {row}" if self.is_parquet else f"line {row + 1}"

    def location(self, row: int) -> str:
        """Where a row is."""
        return f"{self.path} {self.position(row)}"


@dataclass(frozen=True)
class RowRange:
    """Row groups `[first_group, end_group)` of a Parquet file; `first_row` is the number of their first row in the file."""

    first_group: int
    end_group: int
    first_row: int


@dataclass(frozen=True)
class MalformedLine:
    """Stands for a line of JSONL that is not a row, or for what a row of Parquet has and Python cannot hold."""

    detail: str
    is_utf8: bool = True


def list_row_files(paths: Sequence[str], where: str, what: str = "shard") -> tuple[RowFile, ...]:
    """The files of rows behind files, folders (at any depth) and globs: sorted by path, each once, also behind links.

    Args:
        where: the setting that names the paths, for messages.
        what: what such a file is called there.

    Raises:
        InputError: nothing named, nothing behind a path, a named file of another kind, an empty file.
    """
    if not paths:
        raise InputError(where, "no path", "at least one file, folder or glob")
    found = sorted((info for path in paths for info in _expand(path, where, what)), key=lambda info: info.path)
    once = {storage.real_path(info.path): info for info in reversed(found)}  # by the first of its names
    files = tuple(RowFile(info.path, info.size, info.version) for info in reversed(once.values()))
    for file in files:
        if not file.size:
            raise InputError(
                file.path, "an empty file (0 bytes)", f"a {what} with rows", "Remove it or write it again."
            )
    return files


def parquet_schema(file: RowFile) -> tuple[pa.Schema, int]:
    """Schema and number of rows, from the file's footer.

    Raises:
        InputError: not a Parquet file, or two columns have one name.
    """
    with storage.open_read(file.path) as stream:
        parquet = _open_parquet(file, stream)
        return parquet.schema_arrow, parquet.metadata.num_rows


def row_ranges(file: RowFile, num_bytes: int) -> list[RowRange]:
    """A Parquet file cut between row groups into ranges of at least `num_bytes` before compression, the last one excepted.

    Raises:
        InputError: as `parquet_schema`.
    """
    with storage.open_read(file.path) as stream:
        metadata = _open_parquet(file, stream).metadata
    ranges = []
    first_group = first_row = num_rows = size = 0
    for group in range(metadata.num_row_groups):
        num_rows += metadata.row_group(group).num_rows
        size += metadata.row_group(group).total_byte_size
        if size >= num_bytes or group == metadata.num_row_groups - 1:
            ranges.append(RowRange(first_group, group + 1, first_row))
            first_group, first_row, size = group + 1, num_rows, 0
    return ranges


def parquet_batches(file: RowFile, columns: Sequence[str], rows: RowRange | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, or of a range, with those of `columns` that it has; memory: a few pages of each column.

    Raises:
        InputError: the file is damaged; names the row up to which it could be read.
    """
    num_read = rows.first_row if rows else 0
    with storage.open_read(file.path) as stream:
        parquet = _open_parquet(file, stream)
        present = [name for name in dict.fromkeys(columns) if name in parquet.schema_arrow.names]
        try:
            groups = range(rows.first_group, rows.end_group) if rows else range(parquet.num_row_groups)
            for batch in parquet.iter_batches(BATCH_ROWS, list(groups), present, use_threads=False):
                yield batch
                num_read += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _damaged(file, file.position(num_read), error) from error


def python_values(rows: pa.RecordBatch | pa.Table | pa.Array) -> list[Any]:
    """`rows.to_pylist()`, in which a `MalformedLine` stands for each row that has no Python value."""
    try:
        return list(rows.to_pylist())
    except (ValueError, OverflowError):
        return [_python_value(rows.slice(index, 1)) for index in range(len(rows))]


def json_lines(file: RowFile) -> Iterator[tuple[int, dict[str, Any] | MalformedLine]]:
    """The rows of a JSONL file with their numbers. Memory is bounded by one line.

    Raises:
        InputError: the file is in UTF-16, or damaged; names the line up to which it could be read.
    """
    number = 0
    with storage.open_input(file.path) as stream:
        try:
            while line := stream.readline(MAX_LINE_BYTES):
                if not number and line.startswith(_UTF_16):
                    raise InputError(file.path, "text in UTF-16", "JSONL in UTF-8", _TO_UTF_8)
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n") and _skip_line(stream):
                    yield number, MalformedLine(f"a line of more than {MAX_LINE_BYTES} bytes")
                elif line.removeprefix(codecs.BOM_UTF8).strip():
                    yield number, _parse_line(line)
                number += 1
        except (pa.ArrowException, OSError, EOFError) as error:
            raise _damaged(file, file.position(number), error) from error


def is_unicode(value: Any) -> bool:
    """Whether all texts in a JSON value are text: JSON can spell half of a surrogate pair, which is no character."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(each, dict):
            pending += [*each, *each.values()]
        elif isinstance(each, list):
            pending += each
    return True


def _expand(path: str, where: str, what: str) -> list[storage.FileInfo]:
    if not storage.is_s3(path):
        path = os.path.abspath(path)
    single = storage.find_file(path)
    if single is not None:
        if not path.lower().endswith(SUFFIXES):
            raise _wrong_kind(where, path)
        return [single]
    is_glob = any(mark in path for mark in "*?[") and not os.path.isdir(path)
    found = storage.list_glob(path) if is_glob else storage.list_folder(path)
    visible = [info for info in found if not _is_side_file(info.path, path)]
    chosen = [info for info in visible if info.path.lower().endswith(SUFFIXES)]
    if not chosen:
        document = next((info for info in visible if info.path.lower().endswith(_DOCUMENT_SUFFIXES)), None)
        if document is not None:
            raise _wrong_kind(where, document.path)
        missing = ", which does not exist" if not found and not is_glob and not storage.exists(path) else ""
        expected = f"files whose name ends in {', '.join(SUFFIXES)}"
        raise InputError(where, f"no {what} behind {path!r}{missing}", expected, "Check the spelling.")
    if len(chosen) < len(found):
        _logger.info("%s: %d of %d files behind %s are taken", where, len(chosen), len(found), path)
    return chosen


def _is_side_file(path: str, asked: str) -> bool:
    """Whether a part of the path begins with `_` or `.`, and the folder or glob that was asked for does not spell it."""
    spelled = [part for part in asked.split("/") if part.startswith(("_", "."))]
    return any(
        part.startswith(("_", ".")) and part not in spelled and not any(fnmatch.fnmatchcase(part, s) for s in spelled)
        for part in path.split("/")
    )


def _wrong_kind(where: str, path: str) -> InputError:
    expected = f"a file of type Parquet or JSONL: its name ends in {', '.join(SUFFIXES)}"
    if not path.lower().endswith(_DOCUMENT_SUFFIXES):
        return InputError(where, f"the file {path}", expected, "Rename or convert it.")
    advice = "If it has one object a line, rename it to .jsonl; if it is an array: jq -c '.[]' FILE.json > FILE.jsonl"
    return InputError(where, f"{path}, a JSON document", expected, advice)


def _open_parquet(file: RowFile, stream: BinaryIO) -> pq.ParquetFile:
    try:
        # Without pre_buffer and with a buffer size, a large row group is read page by page and not as a whole.
        parquet = pq.ParquetFile(stream, pre_buffer=False, buffer_size=COLUMN_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, "its footer", f"not a readable Parquet file ({error})") from error
    repeated = [name for name, count in Counter(parquet.schema_arrow.names).items() if count > 1]
    if repeated:
        found = f"more than one column named {', '.join(map(repr, repeated))}"
        raise InputError(file.path, found, "each column name once", "Rename or drop a column.")
    return parquet


def _python_value(row: pa.RecordBatch | pa.Table | pa.Array) -> Any:
    try:
        return row.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return MalformedLine(f"unreadable: {error}")


def _skip_line(stream: BinaryIO) -> bool:
    """Reads to the end of a line; whether there was more of it."""
    rest = last = stream.readline(MAX_LINE_BYTES)
    while last and not last.endswith(b"\n"):
        last = stream.readline(MAX_LINE_BYTES)
    return bool(rest.strip())


def _parse_line(line: bytes) -> dict[str, Any] | MalformedLine:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return MalformedLine(f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start}", is_utf8=False)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return MalformedLine(f"not JSON: {error}")
    if not isinstance(row, dict):
        return MalformedLine(f"a JSON {type(row).__name__}, not an object")
    # A line with few brackets needs no walk.
    if line.count(b"{") + line.count(b"[") > MAX_DEPTH and _is_deep(row):
        return MalformedLine(f"JSON that is nested deeper than {MAX_DEPTH} levels")
    return row


def _is_deep(row: dict[str, Any]) -> bool:
    """Whether objects and lists nest deeper than `MAX_DEPTH`, the row itself being level 1."""
    level: list[Any] = [row]
    for _ in range(MAX_DEPTH):
        inner = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inner if isinstance(value, dict | list)]
    return bool(level)


def _damaged(file: RowFile, position: str, error: object) -> InputError:
    kind = "Parquet" if file.is_parquet else "JSONL"
    found = f"unreadable from {position} on: {error}"
    return InputError(file.path, found, f"a whole {kind} file", "Write the file again.")
