"""How many positions each layout runs through the model: exact, and the same on every machine."""

from typing import NamedTuple

from benchmarks import published_layout
from benchmarks.lengths import random_samples
from workers.objectives.mars import MarsObjective

VOCAB_SIZE = 1000  # lengths do not depend on it
NUM_SAMPLES, NUM_DRAWS = 32, 20  # the default step of a training job


class PositionCount(NamedTuple):
    """Means per sample: positions of the forwards, padding among them, and positions that the head runs on."""

    positions: float
    padding: float
    head: float


def count_published(*, long_prompts: bool, micro_batch_rows: int) -> PositionCount:
    """The published layout; its head runs everywhere."""
    positions = real = 0
    for draw in range(NUM_DRAWS):
        samples = random_samples(NUM_SAMPLES, draw, vocab_size=VOCAB_SIZE, long_prompts=long_prompts)
        for members in published_layout.sorted_batches(samples, micro_batch_rows):
            positions += 2 * len(members) * max(len(sample.token_ids) for sample in members)
            real += 2 * sum(len(sample.token_ids) for sample in members)
    count = NUM_SAMPLES * NUM_DRAWS
    return PositionCount(positions / count, (positions - real) / count, positions / count)


def count_packed(block_size: int, row_tokens: int, micro_batch_rows: int, *, long_prompts: bool) -> PositionCount:
    """Our layout: MARS with random cuts, or AR SFT as blocks of one."""
    is_mars = block_size > 1
    objective = MarsObjective(block_size, 1.0, float(is_mars), is_mars, VOCAB_SIZE - 1, seed=0)
    positions = padding = head = 0
    for draw in range(NUM_DRAWS):
        samples = random_samples(NUM_SAMPLES, draw, vocab_size=VOCAB_SIZE, long_prompts=long_prompts)
        for batch in objective.pack(samples, row_tokens=row_tokens, micro_batch_rows=micro_batch_rows):
            positions += batch.num_tokens + batch.num_padding
            padding += batch.num_padding
            head += len(batch.source_N)
    count = NUM_SAMPLES * NUM_DRAWS
    return PositionCount(positions / count, padding / count, head / count)
