"""Each rank's share of the sample order (see `sample_order`) as a stream of optimizer steps, read by Ray Data.

Nothing is dropped, and every rank gets a list, maybe an empty one, for every step.
"""

import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from numpy.typing import NDArray

from pipelines import storage
from pipelines.sample_order import (
    ShuffleWindow,
    StreamPlan,
    epoch_windows,
    num_tokens_of,
    piece_rows,
    rank_positions,
    window_positions,
)
from pipelines.sft_rows import PART_SCHEMA
from workers.objectives.streams import Sample

# Windows of one Ray Data execution: the list of windows stays small however many epochs there are.
WINDOWS_PER_EXECUTION = 512
# Two ranks and their streams fit a machine of two CPUs: 2 x 0.5 for training, 2 x 0.25 for each stream.
CPUS_PER_TASK = 0.25
TASKS_PER_RANK = 2
MIN_BYTES_AHEAD = 32 << 20
BYTES_PER_TOKEN = 4
_STREAM_SCHEMA = PART_SCHEMA.append(pa.field("position", pa.int64())).append(pa.field("epoch", pa.int64()))


class _WindowItem(NamedTuple):
    """A window, and the positions `[first, last)` of its epoch that are still to come and wanted."""

    window: ShuffleWindow
    first: int
    last: int


def rank_steps(plan: StreamPlan, rank: int, world_size: int, start_step: int) -> Iterator[list[Sample]]:
    """The samples of one rank, one list per optimizer step from `start_step` to the last, in the order of the plan.

    The stream is a Ray Data pipeline that runs in the calling process; its tasks hold one window each, and what lies
    before `start_step` is not read.
    """
    assert 0 <= rank < world_size
    # Closing ends the pipeline at once when the caller stops early.
    with contextlib.closing(_rank_samples(plan, rank, world_size, start_step)) as samples:
        for span in plan.epoch_spans():
            for step in range(max(start_step, span.first_step), span.end_step):
                expected = list(rank_positions(plan, span, step, rank, world_size))
                got = [next(samples) for _ in expected]
                assert [position for position, _ in got] == expected, f"rank {rank} step {step}: samples out of order"
                yield [sample for _, sample in got]


def _rank_samples(
    plan: StreamPlan, rank: int, world_size: int, start_step: int
) -> Generator[tuple[int, Sample], None, None]:
    """Position in the epoch and sample, for each sample of the rank from `start_step` on."""
    batch: list[_WindowItem] = []
    for item in _window_items(plan, start_step):
        batch.append(item)
        if len(batch) == WINDOWS_PER_EXECUTION:
            yield from _run_windows(plan, batch, rank, world_size)
            batch = []
    yield from _run_windows(plan, batch, rank, world_size)


def _window_items(plan: StreamPlan, start_step: int) -> Iterator[_WindowItem]:
    """The windows from `start_step` to the last step."""
    for span in plan.epoch_spans():
        first = max(0, start_step - span.first_step) * plan.samples_per_step
        last = min((span.end_step - span.first_step) * plan.samples_per_step, span.num_samples)
        if first >= last:
            continue
        for window in epoch_windows(plan, span.epoch):
            if window.start < last and window.end > first:
                yield _WindowItem(window, first, last)


def _run_windows(
    plan: StreamPlan, items: Sequence[_WindowItem], rank: int, world_size: int
) -> Iterator[tuple[int, Sample]]:
    if not items:
        return
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources(
        object_store_memory=_bytes_ahead(plan, items)
    )
    read = functools.partial(_read_items, plan=plan, items=list(items), rank=rank, world_size=world_size)
    with ray.data.DataContext.current(context):
        dataset = ray.data.range(len(items), override_num_blocks=len(items)).map_batches(
            read,
            batch_size=None,
            batch_format="numpy",
            compute=ray.data.TaskPoolStrategy(size=min(TASKS_PER_RANK, len(items))),
            num_cpus=CPUS_PER_TASK,
        )
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from samples_of(table)


def _bytes_ahead(plan: StreamPlan, items: Sequence[_WindowItem]) -> float:
    """Shared memory for windows that are read but not yet used: without a limit Ray Data reads on until the store is full."""
    largest = max(sum(num_tokens_of(plan, piece) for piece in item.window.pieces) for item in items)
    return float(max(MIN_BYTES_AHEAD, 2 * TASKS_PER_RANK * largest * BYTES_PER_TOKEN))


def _read_items(
    batch: dict[str, NDArray[np.int64]],
    plan: StreamPlan,
    items: list[_WindowItem],
    rank: int,
    world_size: int,
) -> Iterator[pa.Table]:
    """The task: the rank's rows of each window, in order."""
    pa.set_cpu_count(1)
    for index in batch["id"].tolist():
        yield _read_window(plan, items[index], rank, world_size)


def _read_window(plan: StreamPlan, item: _WindowItem, rank: int, world_size: int) -> pa.Table:
    """The rows of a window that are the rank's and wanted, by position. Rows of other ranks are let go part by part."""
    positions = window_positions(plan, item.window)
    tables = [_STREAM_SCHEMA.empty_table()]
    start = 0
    for piece in item.window.pieces:
        at = positions[start : start + piece.num_rows]
        start += piece.num_rows
        wanted = (at % world_size == rank) & (at >= item.first) & (at < item.last)
        if not wanted.any():
            continue
        part = plan.index.parts[piece.part]
        with storage.open_read(part.path) as file:
            table = pq.read_table(file, use_threads=False)
        assert table.num_rows == part.num_rows, f"{part.path} has changed"
        rows, num_uses = piece_rows(plan, piece)
        taken = table.take(pa.array(rows[wanted]))
        taken = taken.append_column("position", pa.array(at[wanted]))
        tables.append(taken.append_column("epoch", pa.array(num_uses[wanted])))
    return pa.concat_tables(tables).sort_by("position")


def samples_of(table: pa.Table) -> Iterator[tuple[int, Sample]]:
    """Position and sample of each row: the columns of a part, and `position` and `epoch`."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for index in range(table.num_rows):
        # A copy: a view would keep the whole block in shared memory for as long as one sample lives.
        token_ids = columns["token_ids"][index].values.to_numpy().astype(np.int32, copy=True)
        responses = zip(columns["starts"][index].as_py(), columns["ends"][index].as_py(), strict=True)
        sample = Sample(
            file=columns["file"][index].as_py(),
            row=columns["row"][index].as_py(),
            epoch=columns["epoch"][index].as_py(),
            token_ids=token_ids,
            responses=tuple(responses),
        )
        yield columns["position"][index].as_py(), sample
