"""How long a training rank waits for its samples: the real stream of Ray Data against real steps."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lengths import random_samples
from pipelines import cluster
from pipelines.sample_stream import StreamPlan, rank_steps
from pipelines.sft_data import PreparedIndex, PreparedPart
from pipelines.sft_rows import PART_SCHEMA
from workers.objectives.streams import Sample

ROWS_PER_PART = 512
NUM_PARTS, QUICK_PARTS = 16, 4
NUM_STEPS = 4


@dataclass(frozen=True)
class DataWait:
    """`share`: waiting / (waiting + training) over `num_steps` steps behind the first one, whose wait starts the pipeline."""

    share: float
    num_steps: int
    first_seconds: float
    samples_per_second: float


def measure_data_wait(
    step: Callable[[Sequence[Sample]], float], samples_per_step: int, vocab_size: int, *, quick: bool
) -> DataWait:
    """Trains on a stream from prepared files, one window a part; then lets the stream run alone to see what it could give.

    Args:
        step: one optimizer step; returns its wall-clock seconds.
        quick: fewer files.
    """
    cluster.connect()
    with tempfile.TemporaryDirectory(prefix="marsray-benchmark-") as folder:
        index = write_parts(Path(folder), QUICK_PARTS if quick else NUM_PARTS, vocab_size)
        plan = StreamPlan(
            index, 0, samples_per_step, shuffle_window=ROWS_PER_PART, num_epochs=1, max_steps=NUM_STEPS + 1
        )
        waits, trained = [], []
        stream = rank_steps(plan, 0, 1, 0)
        for _ in range(NUM_STEPS + 1):
            started = time.perf_counter()
            samples = next(stream)
            waits.append(time.perf_counter() - started)
            trained.append(step(samples))
        first, *others = waits
        share = sum(others) / (sum(others) + sum(trained[1:]))
        return DataWait(share, NUM_STEPS, first, stream_speed(index, samples_per_step))


def stream_speed(index: PreparedIndex, samples_per_step: int) -> float:
    """Samples per second of a whole epoch with nobody training, start of the pipeline included."""
    plan = StreamPlan(index, 0, samples_per_step, shuffle_window=ROWS_PER_PART, num_epochs=1, max_steps=None)
    started = time.perf_counter()
    count = sum(len(samples) for samples in rank_steps(plan, 0, 1, 0))
    return count / (time.perf_counter() - started)


def write_parts(folder: Path, num_parts: int, vocab_size: int) -> PreparedIndex:
    """Files as the preparation of SFT shards leaves them, with random samples."""
    parts = []
    for number in range(num_parts):
        samples = random_samples(ROWS_PER_PART, seed=1000 + number, vocab_size=vocab_size)
        rows = [
            {
                "file": number,
                "row": sample.row,
                "token_ids": sample.token_ids,
                "starts": [begin for begin, _ in sample.responses],
                "ends": [end for _, end in sample.responses],
            }
            for sample in samples
        ]
        path = folder / f"{number:05d}-00000.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=PART_SCHEMA), path, compression="zstd")
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        num_responses = sum(end - begin for sample in samples for begin, end in sample.responses)
        parts.append(PreparedPart(str(path), len(samples), num_tokens, num_responses))
    return PreparedIndex(tuple(parts), num_parts * ROWS_PER_PART, 0, {}, "benchmark", ())
