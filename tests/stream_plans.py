"""Plans over prepared parts that may not exist, and a naive reading of their order."""

from pathlib import Path

from pipelines.sample_order import StreamPlan, epoch_windows, piece_rows, window_positions
from pipelines.sft_data import PreparedIndex, PreparedPart
from pipelines.sft_source import Source


def index_of(part_rows: list[int], folder: Path = Path("/nowhere"), sources: tuple[Source, ...] = ()) -> PreparedIndex:
    """One part for each shard."""
    parts = tuple(
        PreparedPart(str(folder / f"{i:05d}.parquet"), rows, 3 * rows, rows, file=i) for i, rows in enumerate(part_rows)
    )
    return PreparedIndex(parts, sum(part_rows), 0, {}, "fingerprint", tuple(map(str, range(len(parts)))), sources)


def plan_of(index: PreparedIndex, **options: int | None) -> StreamPlan:
    defaults = {"seed": 3, "samples_per_step": 8, "shuffle_window": 20, "num_epochs": 2, "max_steps": None}
    return StreamPlan(index, **{**defaults, **options})  # type: ignore[arg-type]


def epoch_uses(plan: StreamPlan, epoch: int) -> list[tuple[int, int, int]]:
    """Naive: (earlier uses, part, row in the part) at each position of the epoch."""
    at: dict[int, tuple[int, int, int]] = {}
    for window in epoch_windows(plan, epoch):
        rows = [
            (uses, piece.part, row)
            for piece in window.pieces
            for row, uses in zip(*(array.tolist() for array in piece_rows(plan, piece)), strict=True)
        ]
        at.update(zip(window_positions(plan, window).tolist(), rows, strict=True))
    return [at[position] for position in range(len(at))]


def epoch_order(plan: StreamPlan, epoch: int) -> list[tuple[int, int]]:
    """(part, row in the part) at each position of the epoch."""
    return [(part, row) for _, part, row in epoch_uses(plan, epoch)]
