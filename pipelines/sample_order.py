"""The order of training samples: a function of (seed, epoch, listing of the parts, weights), computed without reading a row.

The parts of an epoch are permuted, cut into windows of about `shuffle_window` rows, and the rows of a window are permuted. The
sample at position `p` of an epoch belongs to step `p // samples_per_step` of that epoch and to rank `p % world_size`. Epochs
never share a step, so the last step of an epoch may be short. With weights (see `mixture`) epochs differ in length, and a part
that is used more than once stands in the epoch in pieces, none of which has a row twice.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.mixture import ONCE, Share, shares_of
from pipelines.sft_data import PreparedIndex
from workers.errors import InputError

# Also bounds a window when rows are long: 256 MiB of token ids. Part of the order, so not a setting.
WINDOW_TOKENS = 1 << 26
_PARTS_STREAM, _ROWS_STREAM, _CYCLE_STREAM = 0, 1, 2  # and 3 in `mixture`


class EpochSpan(NamedTuple):
    """An epoch, the samples in it, and its steps `[first_step, end_step)`."""

    epoch: int
    num_samples: int
    first_step: int
    end_step: int


class Piece(NamedTuple):
    """The uses `[start, end)` of a part's cycle, at most one of each row."""

    part: int
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        """Rows of the piece, which are samples of the epoch."""
        return self.end - self.start


@dataclass(frozen=True)
class StreamPlan:
    """What is trained on, in which order and for how long; the same on every rank.

    `num_epochs` counts when `max_steps` is None; otherwise epochs follow each other until `max_steps` steps are made.

    Raises:
        InputError: the weights leave no sample for the epochs asked for.
    """

    index: PreparedIndex
    seed: int
    samples_per_step: int
    shuffle_window: int
    num_epochs: int
    max_steps: int | None

    def __post_init__(self) -> None:
        if not self.num_steps:
            raise InputError(
                "data.weights",
                f"weights that use none of {self.index.num_rows} rows in {self.num_epochs} epochs",
                "at least one sample",
                "Raise the weights or the number of epochs.",
            )

    @functools.cached_property
    def _shares(self) -> tuple[Share, ...]:
        return shares_of(self.index, self.seed) if self.index.sources else (ONCE,) * len(self.index.parts)

    @functools.cached_property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        if self.max_steps is not None:
            return self.max_steps
        return max(span.end_step for span in self.epoch_spans())

    @property
    def epochs(self) -> float:
        """Epochs that the steps make; the last one counts by the share of it that is made."""
        *_, last = self.epoch_spans()
        num_steps = -(-last.num_samples // self.samples_per_step)
        return last.epoch + ((last.end_step - last.first_step) / num_steps if num_steps else 1.0)

    def epoch_spans(self) -> Iterator[EpochSpan]:
        """The epochs in order, the last one cut at `max_steps`. An epoch for which the weights leave nothing has no steps."""
        first_step = 0
        for epoch in itertools.count():
            if epoch == self.num_epochs if self.max_steps is None else first_step >= self.max_steps:
                return
            num_samples = sum(piece.num_rows for piece in self.pieces(epoch))
            end_step = first_step - (-num_samples // self.samples_per_step)
            if self.max_steps is not None:
                end_step = min(end_step, self.max_steps)
            yield EpochSpan(epoch, num_samples, first_step, end_step)
            first_step = end_step

    def pieces(self, epoch: int) -> Iterator[Piece]:
        """What an epoch uses of each part, in the order of the parts."""
        for number, (part, share) in enumerate(zip(self.index.parts, self._shares, strict=True)):
            start, end = (share.num_uses_before(e, part.num_rows) for e in (epoch, epoch + 1))
            for first in range(start, end, part.num_rows):
                yield Piece(number, first, min(first + part.num_rows, end))


@dataclass(frozen=True)
class ShuffleWindow:
    """Pieces whose rows are shuffled together, and the positions `[start, end)` that their rows take in the epoch."""

    epoch: int
    number: int
    pieces: tuple[Piece, ...]
    start: int
    end: int


def epoch_windows(plan: StreamPlan, epoch: int) -> list[ShuffleWindow]:
    """The windows of an epoch, in order. Every piece of the epoch is in exactly one."""
    pieces = list(plan.pieces(epoch))
    windows: list[ShuffleWindow] = []
    members: list[Piece] = []
    start = num_rows = num_tokens = 0

    def close() -> None:
        windows.append(ShuffleWindow(epoch, len(windows), tuple(members), start, start + num_rows))

    for number in _generator(plan.seed, epoch, _PARTS_STREAM).permutation(len(pieces)).tolist():
        rows, tokens = pieces[number].num_rows, num_tokens_of(plan, pieces[number])
        if members and (num_rows + rows > plan.shuffle_window or num_tokens + tokens > WINDOW_TOKENS):
            close()
            start += num_rows
            members, num_rows, num_tokens = [], 0, 0
        members.append(pieces[number])
        num_rows, num_tokens = num_rows + rows, num_tokens + tokens
    if members:
        close()
    return windows


def num_tokens_of(plan: StreamPlan, piece: Piece) -> int:
    """Tokens of a piece: exact for a whole part, in proportion for less."""
    part = plan.index.parts[piece.part]
    return part.num_tokens * piece.num_rows // part.num_rows


def window_positions(plan: StreamPlan, window: ShuffleWindow) -> NDArray[np.int64]:
    """For each row of the window's pieces, one after the other, its position in the epoch."""
    permutation = _generator(plan.seed, window.epoch, _ROWS_STREAM, window.number).permutation(
        window.end - window.start
    )
    return window.start + permutation


def piece_rows(plan: StreamPlan, piece: Piece) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of a piece in ascending order, and how often each was used before."""
    num_rows = plan.index.parts[piece.part].num_rows
    cycle = _generator(plan.seed, piece.part, _CYCLE_STREAM).permutation(num_rows)
    uses = np.arange(piece.start, piece.end)
    rows = cycle[uses % num_rows]
    order = np.argsort(rows)
    return rows[order], uses[order] // num_rows


def rank_positions(plan: StreamPlan, span: EpochSpan, step: int, rank: int, world_size: int) -> range:
    """Positions in the epoch that one rank has in a step of it."""
    start = (step - span.first_step) * plan.samples_per_step
    end = min(start + plan.samples_per_step, span.num_samples)
    return range(start + (rank - start) % world_size, end, world_size)


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
