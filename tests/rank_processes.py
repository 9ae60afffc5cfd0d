"""A little cluster of real processes over gloo, and the uneven samples that they train on."""

import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from tiny_models import MASK_ID

from workers.objectives.streams import Sample


def spawn_ranks(function: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Runs `function(rank, *arguments)` in one process for each rank, all in one process group."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    multiprocessing.spawn(_run_rank, (num_ranks, port, function, arguments), nprocs=num_ranks)


def _run_rank(rank: int, num_ranks: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks)
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    function(rank, *arguments)
    torch.distributed.destroy_process_group()


def uneven_samples(seed: int, count: int) -> list[Sample]:
    """Samples of 6 to 39 tokens, the last two thirds of each a response."""
    generator = np.random.default_rng(seed)
    samples = []
    for row in range(count):
        length = int(generator.integers(6, 40))
        ids = generator.integers(2, MASK_ID, length).astype(np.int32)
        samples.append(Sample(0, 10 * seed + row, 0, ids, ((length // 3, length),)))
    return samples
