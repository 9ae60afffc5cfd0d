"""The check of a whole prompt set before a model loads: one pass, with memory that does not grow with it (see `prompt_ids`).

What is wrong with a shard or with the ids stops the job here; what is wrong with one row becomes that row's error.
"""

import io
import itertools
import os
from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from pipelines.column_types import is_messages, is_text
from pipelines.prompt_ids import NUM_SHOWN, IdIndex
from pipelines.prompt_rows import PromptFile, RawRow, json_rows, read_chunks
from pipelines.row_files import BATCH_ROWS, MalformedLine, json_lines, parquet_batches, parquet_schema, python_values
from pipelines.work_units import PromptSet, list_prompt_files
from workers.config import PromptSettings
from workers.errors import InputError

RESULT_COLUMNS = (
    "id",
    "text",
    "token_ids",
    "finish_reason",
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_forwards",
    "forwards_per_window",
    "logprobs",
)
_NOT_ONE_TYPE = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)


def check_prompt_set(settings: PromptSettings, output: str) -> PromptSet:
    """Reads the set once and returns what the job needs to know about it.

    Raises:
        InputError: no files or rows; output and input overlap; a shard without prompts or with a column of a wrong type;
            ids that are null, unreadable, double, of mixed or unfit types, with locations; passed-through columns that are
            absent or have several types.
    """
    _check_passthrough_names(settings)
    files = list_prompt_files(settings.paths)
    require_apart(settings.paths, files, output)
    extra = _ExtraTypes(settings.passthrough)
    num_rows_of = []
    with IdIndex(settings.id_column) as ids:
        for number, file in enumerate(files):
            check = _check_parquet if file.is_parquet else _check_json
            num_rows_of.append(check(settings, file, number, ids, extra))
        has_ids = ids.has_ids()
        ids.require_present()
        _require_unique(settings, files, ids)
        id_type = pa.int64() if ids.kind() == "integer" else pa.string()
    if not sum(num_rows_of):
        raise InputError("prompts.paths", f"no rows in {len(files)} files", "at least one prompt")
    return PromptSet(settings, files, tuple(num_rows_of), id_type, has_ids, extra.schema())


def require_apart(paths: Sequence[str], files: Sequence[PromptFile], output: str) -> None:
    """Refuses an output folder that is an input, lies inside one, or holds one: writing there would change the input.

    Local paths are compared as the places that they lead to, through links and `..`.

    Raises:
        InputError: names both.
    """
    places = _places(output)
    for path in dict.fromkeys([*paths, *(file.path for file in files)]):
        inputs = _places(path)
        is_inside = any(f"{place}/".startswith(f"{each}/") for place in places for each in inputs)
        if is_inside or any(each.startswith(f"{place}/") for place in places for each in inputs):
            what = "equal to or inside" if is_inside else "around"
            raise InputError("output", f"{output}, {what} the input {path}", "a folder of its own", "Name another one.")
    for path in paths:
        if any(storage.matches_glob(f"{p}/part-0.parquet", pattern) for p in places for pattern in _places(path)):
            found = f"{output}, whose files the input {path} would take for prompts"
            raise InputError("output", found, "a folder of its own", "Name another one.")


def _places(path: str) -> set[str]:
    """Where a path is, and where it leads to when its last name is a link; both without links in the folders above."""
    if storage.is_s3(path):
        return {path.rstrip("/")}
    folder, name = os.path.split(os.path.abspath(path))
    return {os.path.join(os.path.realpath(folder), name).rstrip("/"), os.path.realpath(path).rstrip("/")}


def _check_passthrough_names(settings: PromptSettings) -> None:
    for index, name in enumerate(settings.passthrough):
        if name in RESULT_COLUMNS:
            expected = f"a name other than {', '.join(RESULT_COLUMNS)}"
            raise InputError("prompts.passthrough", repr(name), expected, "Rename the column in the input.")
        if name in settings.passthrough[:index]:
            raise InputError("prompts.passthrough", f"{name!r} twice", "each column once")


class _ExtraTypes:
    """The types of the passed-through columns, widened as shards are read (integers to floats, null to anything)."""

    def __init__(self, names: Sequence[str]) -> None:
        self._types: dict[str, tuple[pa.DataType, str]] = {name: (pa.null(), "") for name in names}

    def names(self) -> list[str]:
        return list(self._types)

    def add(self, name: str, new_type: pa.DataType, where: str) -> None:
        old_type, first = self._types[name]
        schemas = [pa.schema([(name, each)]) for each in (old_type, new_type)]
        try:
            unified = pa.unify_schemas(schemas, promote_options="permissive").field(name).type
        except _NOT_ONE_TYPE as error:
            found = f"column {name!r} is {old_type} in {first} and {new_type} in {where}"
            raise InputError("prompts.passthrough", found, "one type in all shards", "Convert one of them.") from error
        self._types[name] = (unified, first or where)

    def add_values(self, name: str, rows: Sequence[RawRow]) -> None:
        """The column's type in some JSON rows."""
        try:
            self.add(name, pa.array([row.values.get(name) for row in rows]).type, rows[0].location)
        except _NOT_ONE_TYPE:
            for row in rows:
                try:
                    self.add(name, pa.array([row.values.get(name)]).type, row.location)
                except _NOT_ONE_TYPE as error:
                    raise InputError(row.location, f"{name!r}: {error}", "a value that has one Arrow type") from error

    def schema(self) -> pa.Schema:
        """Raises InputError when Parquet cannot hold a column."""
        schema = pa.schema([(name, column_type) for name, (column_type, _) in self._types.items()])
        try:
            pq.write_table(schema.empty_table(), io.BytesIO())
        except _NOT_ONE_TYPE as error:
            raise InputError("prompts.passthrough", str(error), "columns that Parquet can hold") from error
        return schema


def _require_unique(settings: PromptSettings, files: Sequence[PromptFile], ids: IdIndex) -> None:
    pairs = ids.duplicates()
    if not pairs:
        return
    shown = []
    for first, second in pairs:
        row = _row_at(files[second[0]], settings.id_column, second[1])
        location = _row_at(files[first[0]], settings.id_column, first[1]).location
        shown.append(f"{row.values[settings.id_column]!r} at {location} and {row.location}")
    raise InputError(
        f"prompts.id_column `{settings.id_column}`",
        f"duplicate ids: {'; '.join(shown)}",
        "each id once",
        "Make them unique, or name a column that no shard has to have ids made from file and row number.",
    )


def _row_at(file: PromptFile, column: str, number: int) -> RawRow:
    for rows, _ in read_chunks(file, (column,), pa.schema([])):
        for row in rows:
            if row.number == number:
                return row
    raise InputError(file.path, "fewer rows than a moment ago", "input that stays the same during a job")


def _check_parquet(settings: PromptSettings, file: PromptFile, number: int, ids: IdIndex, extra: _ExtraTypes) -> int:
    schema, num_rows = parquet_schema(file)
    _require_prompt(settings, file, schema.names)
    _check_prompt_types(settings, file, schema)
    for name in extra.names():
        if name not in schema.names:
            raise _no_extra(file, name)
        extra.add(name, schema.field(name).type, file.path)
    has_ids = settings.id_column in schema.names
    scan = _IdScan(ids, number, file)
    if has_ids:
        for batch in parquet_batches(file, [settings.id_column]):
            numbered = list(enumerate(python_values(batch.column(0)), start=scan.num_rows))
            for row, value in numbered:
                if isinstance(value, MalformedLine):
                    found = f"an id in {settings.id_column!r} that is {value.detail}"
                    raise InputError(file.location(row), found, "a string or a 64-bit integer", "Correct the id.")
            scan.add(numbered)
    ids.end_file(file, scan.null_locations, scan.num_nulls, has_column=has_ids)
    return num_rows


def _check_json(settings: PromptSettings, file: PromptFile, number: int, ids: IdIndex, extra: _ExtraTypes) -> int:
    """Lines that cannot be read count as rows; they have no id to check."""
    columns = [settings.id_column, settings.prompt_column, settings.messages_column, *extra.names()]
    seen: set[str] = set()
    scan = _IdScan(ids, number, file)
    rows = json_rows(file, columns)
    while chunk := list(itertools.islice(rows, BATCH_ROWS)):
        readable = [row for row in chunk if not row.problem]
        seen.update(*(row.values for row in readable))
        for name in extra.names() if readable else ():
            extra.add_values(name, readable)
        scan.add([(row.number, _UNREADABLE if row.problem else row.values.get(settings.id_column)) for row in chunk])
    if scan.num_rows > scan.num_unreadable:
        if seen.isdisjoint((settings.prompt_column, settings.messages_column)):
            # Only the columns of the settings are read; the message names those that there are.
            first = [row for _, row in itertools.islice(json_lines(file), BATCH_ROWS) if isinstance(row, dict)]
            _require_prompt(settings, file, {str(name) for row in first for name in row})
        for name in extra.names():
            if name not in seen:
                raise _no_extra(file, name)
        ids.end_file(file, scan.null_locations, scan.num_nulls, has_column=settings.id_column in seen)
    return scan.num_rows


_UNREADABLE = object()


class _IdScan:
    """Counts the rows of one file and puts their ids into the index."""

    def __init__(self, ids: IdIndex, number: int, file: PromptFile) -> None:
        self._ids, self._number, self._file = ids, number, file
        self.num_rows = self.num_nulls = self.num_unreadable = 0
        self.null_locations: list[str] = []

    def add(self, rows: Sequence[tuple[int, Any]]) -> None:
        """Takes number and id of the next rows."""
        kept: list[tuple[int, Any]] = []
        for row, value in rows:
            if value is _UNREADABLE:
                self.num_unreadable += 1
            elif value is None:
                self.num_nulls += 1
                self.null_locations = [*self.null_locations, self._file.location(row)][:NUM_SHOWN]
            else:
                kept.append((row, value))
        self.num_rows += len(rows)
        locations = [self._file.location(row) for row, _ in kept]
        self._ids.add(self._number, [row for row, _ in kept], [value for _, value in kept], locations)


def _require_prompt(settings: PromptSettings, file: PromptFile, names: Collection[str]) -> None:
    if settings.prompt_column not in names and settings.messages_column not in names:
        raise InputError(
            file.path,
            f"columns {', '.join(sorted(names)) or '(none)'}",
            f"`{settings.prompt_column}` or `{settings.messages_column}`",
            "Set prompts.prompt_column or prompts.messages_column.",
        )


def _check_prompt_types(settings: PromptSettings, file: PromptFile, schema: pa.Schema) -> None:
    for name, expected, is_fit in (
        (settings.prompt_column, "strings", is_text),
        (settings.messages_column, "a list of {role, content}", is_messages),
    ):
        if name in schema.names and not is_fit(schema.field(name).type):
            raise InputError(file.path, f"column {name!r} of type {schema.field(name).type}", expected)


def _no_extra(file: PromptFile, name: str) -> InputError:
    return InputError("prompts.passthrough", f"no column {name!r} in {file.path}", "the column in every shard")
