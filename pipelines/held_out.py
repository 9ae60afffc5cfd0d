"""The samples of the held-out loss: the first ones in listing order, dealt out to the ranks."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from pipelines.sample_stream import samples_of
from pipelines.sft_data import PreparedIndex
from workers.objectives.streams import Sample


@dataclass(frozen=True)
class HeldOutPlan:
    """What the held-out loss is computed on, the first `max_samples` of `index`, and every how many steps."""

    index: PreparedIndex
    max_samples: int
    every: int


def held_out_samples(plan: HeldOutPlan, rank: int, world_size: int) -> list[Sample]:
    """This rank's share of the samples; every one has the same block cuts at each evaluation.

    Parts are read to the last one needed and no further, one at a time.
    """
    samples: list[Sample] = []
    start = 0
    for part in plan.index.parts:
        if start >= plan.max_samples:
            break
        with storage.open_read(part.path) as file:
            table = pq.read_table(file, use_threads=False)
        table = table.slice(0, plan.max_samples - start)
        position = start + np.arange(table.num_rows)
        table = table.append_column("position", pa.array(position))
        table = table.append_column("epoch", pa.array(np.zeros(table.num_rows, dtype=np.int64)))
        samples += [sample for _, sample in samples_of(table.filter(pa.array(position % world_size == rank)))]
        start += table.num_rows
    return samples
