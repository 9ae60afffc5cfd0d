"""A prompt set cut into work units by file and row range; the driver reads it once, as a stream.

The driver reads the rows of a unit and sends them with it, because neither a compressed JSONL file nor a Parquet file of one
row group can be entered in the middle: actors that opened their own ranges would read each file over and over. What is in
memory is the listing of the files and the rows of the units that are queued or running.
"""

import posixpath
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.prompt_rows import OVERRIDE_COLUMNS, PromptFile, RawRow, read_chunks
from pipelines.row_files import list_row_files
from workers.config import PromptSettings
from workers.errors import InputError


@dataclass(frozen=True)
class WorkUnit:
    """Some rows of file number `file` of the sorted listing: `num_rows` from the `first_row`-th on, blank lines not counted."""

    file: int
    index: int
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        """A function of file and row range, so a unit that runs twice writes the same files."""
        return f"{self.file:05d}-{self.index:06d}"


@dataclass(frozen=True)
class PromptRow:
    """One prompt as it stands in the file. `problem` says why it could not be read; see `RawRow`."""

    id: str | int | None
    location: str
    values: dict[str, Any]
    problem: str


@dataclass(frozen=True)
class UnitRows:
    """A unit with its rows, and the columns that pass through, row by row."""

    unit: WorkUnit
    rows: tuple[PromptRow, ...]
    extra: pa.Table


@dataclass(frozen=True)
class PromptSet:
    """A prompt set that has passed the preflight.

    Attributes:
        files: the sorted listing.
        num_rows_of: rows of each file.
        id_type: Arrow type of the ids: string or int64.
        has_ids: False when ids are made from file and row number.
        extra: names and types of the columns that pass through.
    """

    settings: PromptSettings
    files: tuple[PromptFile, ...]
    num_rows_of: tuple[int, ...]
    id_type: pa.DataType
    has_ids: bool
    extra: pa.Schema

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(self.num_rows_of)

    @property
    def num_units(self) -> int:
        """Units of all files."""
        return sum(-(-num_rows // self.settings.rows_per_unit) for num_rows in self.num_rows_of)

    def units(self) -> Iterator[WorkUnit]:
        """All units in the order of the listing."""
        for file in range(len(self.files)):
            yield from self._units_of(file)

    def read(self, finished: Collection[str] = frozenset()) -> Iterator[UnitRows]:
        """The units whose name is not in `finished`, with their rows, in the order of the listing.

        Raises:
            InputError: a file is damaged, or is not as long as it was in the preflight.
        """
        for number, file in enumerate(self.files):
            if all(unit.name in finished for unit in self._units_of(number)):
                continue
            pending = [unit.name not in finished for unit in self._units_of(number)]
            for unit_rows in self._read_file(number, file):
                if pending[unit_rows.unit.index]:
                    yield unit_rows

    def _units_of(self, file: int) -> Iterator[WorkUnit]:
        size, num_rows = self.settings.rows_per_unit, self.num_rows_of[file]
        for index, first_row in enumerate(range(0, num_rows, size)):
            yield WorkUnit(file, index, first_row, min(size, num_rows - first_row))

    def _read_file(self, number: int, file: PromptFile) -> Iterator[UnitRows]:
        units = self._units_of(number)
        unit: WorkUnit | None = next(units)
        rows: list[RawRow] = []
        extra = self.extra.empty_table()
        num_read = 0
        for new_rows, new_extra in read_chunks(file, row_columns(self.settings), self.extra):
            rows += new_rows
            num_read += len(new_rows)
            if self.extra.names:
                extra = pa.concat_tables([extra, new_extra])
            while unit is not None and len(rows) >= unit.num_rows:
                yield self._unit_rows(unit, file, rows[: unit.num_rows], extra.slice(0, unit.num_rows))
                rows, extra = rows[unit.num_rows :], extra.slice(unit.num_rows)
                unit = next(units, None)
        if num_read != self.num_rows_of[number]:
            raise InputError(
                file.path,
                f"{num_read} rows now, {self.num_rows_of[number]} in the preflight",
                "input that stays the same during a job",
                "Start the job again with overwrite=true.",
            )

    def _unit_rows(self, unit: WorkUnit, file: PromptFile, rows: list[RawRow], extra: pa.Table) -> UnitRows:
        def make(row: RawRow) -> PromptRow:
            row_id = row.values.get(self.settings.id_column) if self.has_ids else f"{file.name}:{row.number}"
            return PromptRow(row_id, row.location, row.values, row.problem)

        return UnitRows(unit, tuple(make(row) for row in rows), extra.combine_chunks())


def row_columns(settings: PromptSettings) -> tuple[str, ...]:
    """The columns that say what to do: id, prompt or messages, and the settings that a row may override."""
    return (settings.id_column, settings.prompt_column, settings.messages_column, *OVERRIDE_COLUMNS)


def list_prompt_files(paths: tuple[str, ...]) -> tuple[PromptFile, ...]:
    """The prompt files behind files, folders and globs, sorted by path, each once.

    Raises:
        InputError: as `list_row_files`.
    """
    files = list_row_files(paths, "prompts.paths", "prompt file")
    num_same_name = Counter(posixpath.basename(file.path) for file in files)
    return tuple(
        PromptFile(file.path, file.size, file.version, name if num_same_name[name] == 1 else file.path)
        for file, name in ((file, posixpath.basename(file.path)) for file in files)
    )
