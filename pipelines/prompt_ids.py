"""Checks that every row of a prompt set has an id of one type, and none twice, before a model loads.

Memory: 28 bytes a row up to a million rows. Beyond, records are spilled to 256 files on the driver's disk by a hash of the
id, and each file is sorted alone: 28 bytes of disk a row, 28/256 bytes of memory a row. Strings are compared by 128-bit
hashes.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pipelines.prompt_rows import PromptFile
from workers.errors import InputError

_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("file", "<u4"), ("row", "<u8")])
_NUM_BUCKETS = 256
NUM_SHOWN = 3
_KINDS = {str: "string", int: "integer"}


class IdIndex:
    """Collects the ids of a prompt set. Use as a context manager: the spilled records go with it.

    Args:
        column: name of the id column, for messages.
        memory_rows: records held in memory before they are spilled.
    """

    def __init__(self, column: str, memory_rows: int = 1_000_000) -> None:
        self._column, self._memory_rows = column, memory_rows
        self._pending: list[npt.NDArray[Any]] = []
        self._num_pending = 0
        self._folder = tempfile.TemporaryDirectory(prefix="marsray-ids-")
        self._is_spilled = False
        self._nulls: list[str] = []
        self._num_nulls = 0
        self._kinds: dict[str, str] = {}  # kind -> location of the first one
        self._file_has_ids: dict[str, bool] = {}

    def add(self, number: int, rows: Sequence[int], ids: Sequence[Any], locations: Sequence[str]) -> None:
        """Takes the ids, none of them null, of some rows of file `number`.

        Raises:
            InputError: an id is neither a string nor a 64-bit integer, or strings and integers are mixed.
        """
        records = np.zeros(len(ids), _RECORD)
        for index, (row, value) in enumerate(zip(rows, ids, strict=True)):
            self._check_kind(value, locations[index])
            records[index] = (*_digest(value), number, row)
        self._pending.append(records)
        self._num_pending += len(ids)
        if self._num_pending > self._memory_rows:
            self._spill()

    def end_file(self, file: PromptFile, null_locations: Sequence[str], num_nulls: int, *, has_column: bool) -> None:
        """Notes whether the file has the id column, and how many of its rows have a null there, the first with location."""
        self._file_has_ids[file.path] = has_column
        if has_column:
            self._num_nulls += num_nulls
            self._nulls = [*self._nulls, *null_locations][:NUM_SHOWN]

    def has_ids(self) -> bool:
        """Whether the set has ids of its own.

        Raises:
            InputError: some shards have the column and others do not.
        """
        having = [path for path, has_ids in self._file_has_ids.items() if has_ids]
        lacking = [path for path, has_ids in self._file_has_ids.items() if not has_ids]
        if having and lacking:
            raise InputError(
                "prompts.id_column",
                f"`{self._column}` in {having[0]} but not in {lacking[0]} (absent in {len(lacking)} shards)",
                "the column in every shard or in none",
                "Add ids to those shards, or name a column that no shard has to have ids made.",
            )
        return bool(having)

    def kind(self) -> str:
        """`string` or `integer`; `string` for a set without ids."""
        return next(iter(self._kinds), "string")

    def require_present(self) -> None:
        """Raises InputError when a row has no id; names the first ones."""
        if self._num_nulls:
            more = " ..." if self._num_nulls > NUM_SHOWN else ""
            raise InputError(
                f"prompts.id_column `{self._column}`",
                f"{self._num_nulls} rows with a null id: {', '.join(self._nulls)}{more}",
                "an id in every row",
                "Fill them in, or drop the column to have ids made from file and row number.",
            )

    def duplicates(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """The first few pairs of rows, as (file, row), that share an id."""
        if self._is_spilled:
            self._spill()
            parts: Iterator[npt.NDArray[Any]] = (np.fromfile(path, _RECORD) for path in sorted(self._files()))
        else:
            parts = iter([np.concatenate([np.zeros(0, _RECORD), *self._pending])])
        found: list[tuple[tuple[int, int], tuple[int, int]]] = []
        for records in parts:
            order = np.lexsort((records["row"], records["file"], records["low"], records["high"]))
            records = records[order]
            same = (records["low"][1:] == records["low"][:-1]) & (records["high"][1:] == records["high"][:-1])
            for index in np.flatnonzero(same)[: NUM_SHOWN - len(found)]:
                first, second = records[index], records[index + 1]
                found.append(((int(first["file"]), int(first["row"])), (int(second["file"]), int(second["row"]))))
        return found

    def _check_kind(self, value: Any, location: str) -> None:
        kind = _KINDS.get(type(value))
        if kind is None or (kind == "integer" and not -(2**63) <= value < 2**63):
            raise InputError(location, f"id {value!r} ({type(value).__name__})", "a string or a 64-bit integer")
        if kind not in self._kinds:
            self._kinds[kind] = f"{location} ({value!r})"
        if len(self._kinds) > 1:
            found = " and ".join(f"{kind} ids at {where}" for kind, where in self._kinds.items())
            raise InputError(f"prompts.id_column `{self._column}`", found, "ids of one type", "Convert one of them.")

    def _files(self) -> list[Path]:
        return list(Path(self._folder.name).iterdir())

    def _spill(self) -> None:
        self._is_spilled = True
        records = np.concatenate([np.zeros(0, _RECORD), *self._pending])
        self._pending, self._num_pending = [], 0
        bucket = ((records["low"] ^ records["high"]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)
        records = records[np.argsort(bucket, kind="stable")]
        edges = np.searchsorted(np.sort(bucket), np.arange(_NUM_BUCKETS + 1))
        for number, (start, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            if end > start:
                with open(Path(self._folder.name) / f"{number:03d}", "ab") as file:
                    records[start:end].tofile(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()


def _digest(value: str | int) -> tuple[int, int]:
    if isinstance(value, int):
        return 0, value % 2**64
    digest = hashlib.blake2b(value.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
