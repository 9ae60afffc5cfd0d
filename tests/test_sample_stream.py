"""The order of samples is a function of (seed, epoch, listing), and the ranks' streams cut it up without loss."""

import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sample_stream import StreamPlan, epoch_windows, rank_steps, window_positions
from pipelines.sft_data import PreparedIndex, PreparedPart
from pipelines.sft_rows import PART_SCHEMA
from workers.errors import InputError
from workers.objectives.streams import Sample


def index_of(part_rows: list[int], folder: Path = Path("/nowhere")) -> PreparedIndex:
    parts = tuple(
        PreparedPart(str(folder / f"{i:05d}.parquet"), rows, 3 * rows, rows) for i, rows in enumerate(part_rows)
    )
    return PreparedIndex(parts, sum(part_rows), 0, {}, "fingerprint", ())


def plan_of(index: PreparedIndex, **options: int | None) -> StreamPlan:
    defaults = {"seed": 3, "samples_per_step": 8, "shuffle_window": 20, "num_epochs": 2, "max_steps": None}
    return StreamPlan(index, **{**defaults, **options})  # type: ignore[arg-type]


def epoch_order(plan: StreamPlan, epoch: int) -> list[tuple[int, int]]:
    """Naive: (part, row in the part) at each position of the epoch."""
    at: dict[int, tuple[int, int]] = {}
    for window in epoch_windows(plan, epoch):
        rows = [(part, row) for part in window.parts for row in range(plan.index.parts[part].num_rows)]
        at.update(zip(window_positions(plan, window).tolist(), rows, strict=True))
    return [at[position] for position in range(plan.index.num_rows)]


PART_ROWS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(PART_ROWS, st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5))
def test_each_epoch_is_a_permutation_of_all_rows(part_rows: list[int], window: int, seed: int, epoch: int) -> None:
    plan = plan_of(index_of(part_rows), shuffle_window=window, seed=seed)
    windows = epoch_windows(plan, epoch)
    assert sorted(itertools.chain.from_iterable(w.parts for w in windows)) == list(range(len(part_rows)))
    assert [w.start for w in windows] == [0, *(w.end for w in windows[:-1])]
    assert all(len(w.parts) == 1 or w.end - w.start <= window for w in windows)
    order = epoch_order(plan, epoch)
    assert sorted(order) == [(part, row) for part, rows in enumerate(part_rows) for row in range(rows)]
    assert order == epoch_order(plan, epoch)


@given(PART_ROWS, st.integers(1, 9), st.integers(1, 9))
def test_order_does_not_depend_on_step_size_or_length_of_the_run(
    part_rows: list[int], samples: int, epochs: int
) -> None:
    index = index_of(part_rows)
    reference = epoch_order(plan_of(index), 1)
    assert epoch_order(plan_of(index, samples_per_step=samples, num_epochs=epochs, max_steps=7), 1) == reference


def test_seeds_and_epochs_give_different_orders() -> None:
    index = index_of([10] * 10)
    orders = {
        tuple(epoch_order(plan_of(index, seed=seed), epoch)) for seed, epoch in itertools.product(range(4), range(4))
    }
    assert len(orders) == 16


def test_order_is_the_same_in_every_version() -> None:
    """Pinned: another order would break the resumption of runs made with an earlier version."""
    expected = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0), (1, 0), (2, 1)]
    assert epoch_order(plan_of(index_of([3, 2, 2]), shuffle_window=4), 0) == expected


def test_long_rows_make_smaller_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sample_stream.WINDOW_TOKENS", 60)
    windows = epoch_windows(plan_of(index_of([10] * 6), shuffle_window=1000), 0)
    assert [len(window.parts) for window in windows] == [2, 2, 2]


@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 4), st.integers(1, 30))
def test_steps(num_rows: int, samples_per_step: int, num_epochs: int, max_steps: int) -> None:
    plan = plan_of(index_of([num_rows]), samples_per_step=samples_per_step, num_epochs=num_epochs)
    assert (plan.steps_per_epoch - 1) * samples_per_step < num_rows <= plan.steps_per_epoch * samples_per_step
    assert plan.num_steps == num_epochs * plan.steps_per_epoch
    assert replace(plan, max_steps=max_steps).num_steps == max_steps


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
    gone = {part: replace(index.parts[part], path=str(tmp_path / "gone.parquet")) for part in first.parts}
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
