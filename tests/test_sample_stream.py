"""The ranks' streams cut the order of samples up without loss, and resume at any step."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stream_plans import epoch_order, index_of, plan_of

from pipelines.sample_order import StreamPlan, epoch_windows
from pipelines.sample_stream import rank_steps
from pipelines.sft_data import PreparedIndex
from pipelines.sft_rows import PART_SCHEMA
from workers.errors import InputError
from workers.objectives.streams import Sample


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PreparedIndex:
    """41 rows in shards of 30, 10 and 1."""
    folder = tmp_path_factory.mktemp("parts")
    index = index_of([30, 10, 1], folder)
    for file, part in enumerate(index.parts):
        rows = [
            {"file": file, "row": row, "token_ids": [file, row, 7], "starts": [1], "ends": [3]}
            for row in range(part.num_rows)
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=PART_SCHEMA), part.path)
    return index


def names(samples: list[Sample]) -> list[tuple[int, int, int]]:
    return [(sample.epoch, sample.file, sample.row) for sample in samples]


def steps_of(plan: StreamPlan, rank: int = 0, world_size: int = 1, start: int = 0) -> list[list[tuple[int, int, int]]]:
    return [names(samples) for samples in rank_steps(plan, rank, world_size, start)]


@pytest.fixture(scope="module")
def reference(index: PreparedIndex, ray_session: None) -> list[list[tuple[int, int, int]]]:
    return steps_of(plan_of(index))


@pytest.mark.timeout(120)
def test_two_ranks_at_once_take_the_same_steps_and_each_row_once(index: PreparedIndex, ray_session: None) -> None:
    """41 rows, two ranks, batch 8: splitting by blocks gave the ranks different step counts, a hang, or lost rows."""
    plan = plan_of(index)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: steps_of(plan, rank, 2), range(2)))
    assert [len(steps) for steps in ranks] == [12, 12] == [plan.num_steps] * 2
    seen = Counter(name for steps in ranks for step in steps for name in step)
    assert seen == Counter(
        (epoch, file, row) for epoch in range(2) for file, rows in enumerate([30, 10, 1]) for row in range(rows)
    )
    sizes = [[len(step) for step in steps] for steps in ranks]
    assert sizes[0] == [4, 4, 4, 4, 4, 1] * 2
    assert sizes[1] == [4, 4, 4, 4, 4, 0] * 2


def test_stream_is_the_order_function(index: PreparedIndex, reference: list[list[tuple[int, int, int]]]) -> None:
    plan = plan_of(index)
    for epoch in range(2):
        order = [(epoch, *place) for place in epoch_order(plan, epoch)]
        steps = [order[start : start + 8] for start in range(0, 41, 8)]
        assert reference[6 * epoch : 6 * epoch + 6] == steps


@pytest.mark.parametrize("world_size", [2, 3])
def test_samples_of_a_step_do_not_depend_on_the_world_size(
    index: PreparedIndex, reference: list[list[tuple[int, int, int]]], world_size: int
) -> None:
    ranks = [steps_of(plan_of(index), rank, world_size) for rank in range(world_size)]
    for step, expected in enumerate(reference):
        assert sorted(name for steps in ranks for name in steps[step]) == sorted(expected)


@pytest.mark.parametrize("start", [1, 5, 6, 9, 12])
def test_resuming_gives_the_tail(index: PreparedIndex, reference: list[list[tuple[int, int, int]]], start: int) -> None:
    assert steps_of(plan_of(index), start=start) == reference[start:]


def test_resuming_reads_nothing_of_what_lies_before(index: PreparedIndex, ray_session: None, tmp_path: Path) -> None:
    plan = plan_of(index, num_epochs=1)
    first = epoch_windows(plan, 0)[0]
    gone = {p.part: replace(index.parts[p.part], path=str(tmp_path / "gone.parquet")) for p in first.pieces}
    parts = tuple(gone.get(number, part) for number, part in enumerate(index.parts))
    start = -(-first.end // 8)
    assert start < plan.num_steps
    broken = replace(plan, index=replace(index, parts=parts))
    assert steps_of(broken, start=start) == steps_of(plan, start=start)
    with pytest.raises(InputError, match=r"gone\.parquet"):
        steps_of(broken)


def test_number_of_steps_is_capped_in_mid_epoch_and_can_exceed_one(
    index: PreparedIndex, reference: list[list[tuple[int, int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_of(plan_of(index, max_steps=2, num_epochs=1)) == reference[:2]
    monkeypatch.setattr("pipelines.sample_stream.WINDOWS_PER_EXECUTION", 3)
    steps = steps_of(plan_of(index, max_steps=20, num_epochs=1))
    assert len(steps) == 20
    assert steps[:12] == reference


def test_samples_carry_tokens_and_spans(index: PreparedIndex, ray_session: None) -> None:
    stream: Iterator[list[Sample]] = rank_steps(plan_of(index, max_steps=1), 0, 1, 0)
    for sample in next(stream):
        assert sample.token_ids.dtype == np.int32
        assert sample.token_ids.tolist() == [sample.file, sample.row, 7]
        assert sample.token_ids.flags.writeable
        assert sample.responses == ((1, 3),)
        assert type(sample.file) is type(sample.row) is type(sample.epoch) is int
