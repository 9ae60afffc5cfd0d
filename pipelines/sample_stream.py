"""The order of training samples, and each rank's share of it as a stream of optimizer steps.

The order of an epoch is a function of (seed, epoch, listing of the parts): the parts are permuted, cut into windows of
about `shuffle_window` rows, and the rows of a window are permuted. The sample at position `p` of an epoch belongs to
step `p // samples_per_step` of that epoch and to rank `p % world_size`. Epochs never share a step, so the last step of
an epoch may be short; nothing is dropped and nothing repeated, and every rank gets a list, maybe an empty one, for
every step.
"""

import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from numpy.typing import NDArray

from pipelines import storage
from pipelines.sft_data import PreparedIndex
from workers.objectives.streams import Sample

# Also bounds a window when rows are long: 256 MiB of token ids. Part of the order, so not a setting.
WINDOW_TOKENS = 1 << 26
# Windows of one Ray Data execution: the list of windows stays small however many epochs there are.
WINDOWS_PER_EXECUTION = 512
# Two ranks and their streams fit a machine of two CPUs: 2 x 0.5 for training, 2 x 0.25 for each stream.
CPUS_PER_TASK = 0.25
TASKS_PER_RANK = 2
MIN_BYTES_AHEAD = 32 << 20
BYTES_PER_TOKEN = 4
_PARTS_STREAM, _ROWS_STREAM = 0, 1


@dataclass(frozen=True)
class StreamPlan:
    """What is trained on, in which order and for how long; the same on every rank.

    `num_epochs` counts when `max_steps` is None; otherwise epochs follow each other until `max_steps` steps are made.
    """

    index: PreparedIndex
    seed: int
    samples_per_step: int
    shuffle_window: int
    num_epochs: int
    max_steps: int | None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last may be short."""
        return -(-self.index.num_rows // self.samples_per_step)

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.steps_per_epoch * self.num_epochs if self.max_steps is None else self.max_steps


@dataclass(frozen=True)
class ShuffleWindow:
    """Parts whose rows are shuffled together, and the positions `[start, end)` that their rows take in the epoch."""

    epoch: int
    number: int
    parts: tuple[int, ...]
    start: int
    end: int


def epoch_windows(plan: StreamPlan, epoch: int) -> list[ShuffleWindow]:
    """The windows of an epoch, in order. Every part is in exactly one."""
    parts = plan.index.parts
    windows: list[ShuffleWindow] = []
    members: list[int] = []
    start = num_rows = num_tokens = 0
    for part in _generator(plan.seed, epoch, _PARTS_STREAM).permutation(len(parts)).tolist():
        rows, tokens = parts[part].num_rows, parts[part].num_tokens
        if members and (num_rows + rows > plan.shuffle_window or num_tokens + tokens > WINDOW_TOKENS):
            windows.append(ShuffleWindow(epoch, len(windows), tuple(members), start, start + num_rows))
            start += num_rows
            members, num_rows, num_tokens = [], 0, 0
        members.append(part)
        num_rows, num_tokens = num_rows + rows, num_tokens + tokens
    windows.append(ShuffleWindow(epoch, len(windows), tuple(members), start, start + num_rows))
    return windows


def window_positions(plan: StreamPlan, window: ShuffleWindow) -> NDArray[np.int64]:
    """For each row of the window's parts, one after the other, its position in the epoch."""
    permutation = _generator(plan.seed, window.epoch, _ROWS_STREAM, window.number).permutation(
        window.end - window.start
    )
    return window.start + permutation


def rank_steps(plan: StreamPlan, rank: int, world_size: int, start_step: int) -> Iterator[list[Sample]]:
    """The samples of one rank, one list per optimizer step from `start_step` to the last, in the order of the plan.

    The stream is a Ray Data pipeline that runs in the calling process; its tasks hold one window each, and what lies
    before `start_step` is not read.
    """
    assert 0 <= rank < world_size
    # Closing ends the pipeline at once when the caller stops early.
    with contextlib.closing(_rank_samples(plan, rank, world_size, start_step)) as samples:
        for step in range(start_step, plan.num_steps):
            expected = _positions_of(plan, rank, world_size, step)
            got = [next(samples) for _ in expected]
            assert [position for position, _ in got] == list(expected), f"rank {rank} step {step}: samples out of order"
            yield [sample for _, sample in got]


def _positions_of(plan: StreamPlan, rank: int, world_size: int, step: int) -> range:
    """Positions in the step's epoch that are this rank's."""
    start = step % plan.steps_per_epoch * plan.samples_per_step
    end = min(start + plan.samples_per_step, plan.index.num_rows)
    return range(start + (rank - start) % world_size, end, world_size)


def _rank_samples(
    plan: StreamPlan, rank: int, world_size: int, start_step: int
) -> Generator[tuple[int, Sample], None, None]:
    """Position in the epoch and sample, for each sample of the rank from `start_step` on."""
    batch: list[dict[str, Any]] = []
    for item in _window_items(plan, start_step):
        batch.append(item)
        if len(batch) == WINDOWS_PER_EXECUTION:
            yield from _run_windows(plan, batch, rank, world_size)
            batch = []
    yield from _run_windows(plan, batch, rank, world_size)


def _window_items(plan: StreamPlan, start_step: int) -> Iterator[dict[str, Any]]:
    """The windows from `start_step` to the last step, each with the positions `[first, last)` that are still to come and wanted."""
    first_epoch, step_in_epoch = divmod(start_step, plan.steps_per_epoch)
    last_epoch, steps_in_last = divmod(plan.num_steps, plan.steps_per_epoch)
    for epoch in range(first_epoch, last_epoch + 1):
        first = step_in_epoch * plan.samples_per_step if epoch == first_epoch else 0
        last = steps_in_last * plan.samples_per_step if epoch == last_epoch else plan.index.num_rows
        if first >= last:
            continue
        for window in epoch_windows(plan, epoch):
            if window.start < last and window.end > first:
                yield {"window": window, "first": first, "last": last}


def _run_windows(
    plan: StreamPlan, items: Sequence[dict[str, Any]], rank: int, world_size: int
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


def _bytes_ahead(plan: StreamPlan, items: Sequence[dict[str, Any]]) -> float:
    """Shared memory for windows that are read but not yet used: without a limit Ray Data reads on until the store is full."""
    parts = plan.index.parts
    largest = max(sum(parts[part].num_tokens for part in item["window"].parts) for item in items)
    return float(max(MIN_BYTES_AHEAD, 2 * TASKS_PER_RANK * largest * BYTES_PER_TOKEN))


def _read_items(
    batch: dict[str, NDArray[np.int64]],
    plan: StreamPlan,
    items: list[dict[str, Any]],
    rank: int,
    world_size: int,
) -> Iterator[pa.Table]:
    """The task: the rank's rows of each window, in order. Rows of other ranks are let go part by part."""
    pa.set_cpu_count(1)
    for index in batch["id"].tolist():
        yield _read_window(plan, rank=rank, world_size=world_size, **items[index])


def _read_window(
    plan: StreamPlan, window: ShuffleWindow, first: int, last: int, *, rank: int, world_size: int
) -> pa.Table:
    """The rows of a window that are the rank's and lie in positions `[first, last)`, by position."""
    positions = window_positions(plan, window)
    wanted = (positions % world_size == rank) & (positions >= first) & (positions < last)
    tables = []
    start = 0
    for part in window.parts:
        with storage.open_read(plan.index.parts[part].path) as file:
            table = pq.read_table(file, use_threads=False)
        assert table.num_rows == plan.index.parts[part].num_rows, f"{plan.index.parts[part].path} has changed"
        rows = slice(start, start + table.num_rows)
        table = table.append_column("position", pa.array(positions[rows]))
        tables.append(table.filter(pa.array(wanted[rows])))
        start += table.num_rows
    merged = pa.concat_tables(tables).sort_by("position")
    return merged.append_column("epoch", pa.array(np.full(merged.num_rows, window.epoch)))


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


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
