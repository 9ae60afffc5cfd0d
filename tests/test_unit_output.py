"""What a unit leaves behind: whatever moment a start is killed at, all starts together leave each row once."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from pipelines import storage, unit_output
from pipelines.manifest import Manifest, Totals
from pipelines.row_requests import RowFault
from pipelines.unit_output import Answer, OutputTask, publish_unit
from pipelines.work_units import PromptRow, UnitRows, WorkUnit
from workers.config import DecodingSettings, PromptSettings
from workers.decoding.request import Result, RowError

NUM_UNITS, ROWS_OF_UNIT = 4, 3
NUM_ROWS = NUM_UNITS * ROWS_OF_UNIT


class KilledError(Exception):
    """Stands for the end of the process."""


def outcome(row: int) -> Answer | RowFault:
    """Every kind of it."""
    if row % 4 == 1:
        return RowFault("null_content", "no prompt")
    error = RowError("prompt_too_long", "long") if row % 4 == 2 else None
    tokens = () if error else tuple(range(row))
    return Answer(Result(row, tokens, "", "stop", 5, len(tokens), 9, Counter({1: len(tokens)}), error=error), row / 10)


def unit(index: int) -> UnitRows:
    first = index * ROWS_OF_UNIT
    rows = tuple(PromptRow(row, f"in line {row + 1}", {}, "") for row in range(first, first + ROWS_OF_UNIT))
    return UnitRows(WorkUnit(0, index, first, ROWS_OF_UNIT), rows, pa.table({}))


def run(output: str) -> None:
    """One start of a job, as far as the output is concerned."""
    task = OutputTask(output, PromptSettings(), DecodingSettings(), pa.int64(), pa.schema([]))
    manifest = Manifest(output, {"model": "m"})
    manifest.check(overwrite=False)
    manifest.start(overwrite=False)
    finished = manifest.finished_units()
    for index in range(NUM_UNITS):
        rows = unit(index)
        if rows.unit.name not in finished:
            publish_unit(task, rows, {place: outcome(row.id) for place, row in enumerate(rows.rows)})  # type: ignore[arg-type]


def ids(output: str) -> Counter[int]:
    paths = [info.path for info in storage.list_folder(output) if Path(info.path).name.startswith("part-")]
    return Counter(row for path in paths for row in pq.read_table(path)["id"].to_pylist())


@example_settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3 * NUM_UNITS), st.booleans()), max_size=5))
def test_each_row_is_there_once_at_whatever_write_each_start_is_killed(kills: list[tuple[int, bool]]) -> None:
    """A kill comes before a write or behind it."""
    publish = storage.publish_bytes
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        output = f"{folder}/out"
        for number, is_written in kills:
            num_writes = 0

            def write(path: str, data: bytes, last: int = number, is_whole: bool = is_written) -> None:
                nonlocal num_writes
                num_writes += 1
                if num_writes < last or is_whole:
                    publish(path, data)
                if num_writes == last:
                    raise KilledError

            patch.setattr(unit_output.storage, "publish_bytes", write)
            try:
                run(output)
            except KilledError:
                assert max(ids(output).values(), default=1) == 1
        patch.setattr(unit_output.storage, "publish_bytes", publish)
        run(output)
        assert ids(output) == Counter(range(NUM_ROWS))
        totals = Totals()
        for entry in Manifest(output, {}).finished_units().values():
            totals.add(entry)
        assert (totals.num_units, totals.num_rows) == (NUM_UNITS, NUM_ROWS)
        assert totals.num_results + totals.errors.total() == NUM_ROWS
        assert totals.errors == {"null_content": 3, "prompt_too_long": 3}


def test_entries_hold_what_the_rows_add_up_to(tmp_path: Path) -> None:
    run(str(tmp_path / "out"))
    totals = Totals()
    for entry in Manifest(str(tmp_path / "out"), {}).finished_units().values():
        totals.add(entry)
    answered: list[Any] = [row for row in range(NUM_ROWS) if row % 4 not in (1, 2)]
    assert totals.num_generated_tokens == totals.num_forwards == totals.kept_per_forward["1"] == sum(answered)
    assert [row.num_tokens for row in totals.longest_rows] == sorted(answered, reverse=True)[:5]
    assert [row.location for row in totals.slowest_rows][:2] == ["in line 12", "in line 9"]
