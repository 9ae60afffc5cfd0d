"""Choosing the window: how many tokens to draft, so that most tokens per second are kept.

A wider window keeps more tokens of a forward and makes it slower. How much slower is measured once for each number of rows; how
many are kept follows from the share of drafts that were right at each depth. The choice is the one with the highest expected
tokens per second (goodput, arXiv 2406.14066); one token per forward is among the candidates. Plain Python.
"""

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

# Seconds of a forward of (rows, query tokens of each, logits of each).
Measure = Callable[[int, int, int], float]

_MEMORY = 0.98  # what a step leaves of the weight of the observations before it
_PRIOR_SHARE, _PRIOR_WEIGHT = 0.7, 2.0
_STEPS_BETWEEN_TRIALS = 128
_LONGEST_MEASURED = 0.25  # seconds of a forward beyond which larger ones are extrapolated
_MARGIN = 1.02  # by which more than one token per forward must be better: what a measurement may be wrong by


@dataclass(frozen=True)
class WindowChoice:
    """W, and whether every point of acceptance has placeholders of its own."""

    window: int
    has_branches: bool

    @property
    def name(self) -> str:
        """As reports have it: `4`, or `4+branches`."""
        return f"{self.window}+branches" if self.has_branches else str(self.window)


ONE_TOKEN = WindowChoice(1, has_branches=False)


class AcceptanceStatistics:
    """How often the draft at each depth is right when those before it are; older steps count less.

    A depth that has not been tried for long is forgotten, and then taken for as good as the one before it: so it is tried again.
    """

    def __init__(self, num_depths: int) -> None:
        self._num_right = [0.0] * num_depths
        self._num_tried = [0.0] * num_depths

    def age(self) -> None:
        """Lets a step pass."""
        self._num_right = [count * _MEMORY for count in self._num_right]
        self._num_tried = [count * _MEMORY for count in self._num_tried]

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Adds what became of the drafts of a row in a step."""
        for depth in range(min(num_drafts, num_accepted + 1, len(self._num_tried))):
            self._num_tried[depth] += 1
            self._num_right[depth] += depth < num_accepted

    def shares(self) -> list[float]:
        """The share of each depth; one that was hardly tried is taken for as good as the one before it."""
        shares: list[float] = []
        prior = _PRIOR_SHARE
        for num_right, num_tried in zip(self._num_right, self._num_tried, strict=True):
            prior = (num_right + _PRIOR_WEIGHT * prior) / (num_tried + _PRIOR_WEIGHT)
            shares.append(prior)
        return shares


class StepCosts:
    """Seconds of a step, measured for a few sizes when they are first asked for, and interpolated between them.

    Args:
        measure: of one size.
        num_slots: most rows.
        most_lanes: most query tokens of a row.
        engine_seconds: of a step besides its forward, at present.
    """

    def __init__(
        self,
        measure: Measure,
        num_slots: int,
        most_lanes: int = 64,
        engine_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._measure, self._num_slots, self._most_lanes = measure, num_slots, most_lanes
        self._engine_seconds = engine_seconds
        self._curve = cache(self._measured_curve)

    def seconds(self, num_rows: int, num_lanes: float, num_picks: float) -> float:
        """Of `num_rows` rows with so many query tokens and logits each."""
        lanes, forward, head = self._curve(self._bucket(num_rows))
        picks = (num_picks - 1) * head + self._engine_seconds()
        if len(lanes) == 1:
            return forward[0] + picks
        if num_lanes > lanes[-1]:
            # Of the last and the mean slope the steeper one: noise may have flattened one of them.
            ends = zip((forward[-2], forward[0]), (lanes[-2], lanes[0]), strict=True)
            slope = max((forward[-1] - seconds) / (lanes[-1] - size) for seconds, size in ends)
            return forward[-1] + slope * (num_lanes - lanes[-1]) + picks
        place = max(bisect_left(lanes, num_lanes), 1)
        share = (num_lanes - lanes[place - 1]) / (lanes[place] - lanes[place - 1])
        return forward[place - 1] + share * (forward[place] - forward[place - 1]) + picks

    def _bucket(self, num_rows: int) -> int:
        """The next power of two, so that few sizes are measured."""
        return min(1 << (num_rows - 1).bit_length(), self._num_slots)

    def _measured_curve(self, num_rows: int) -> tuple[list[int], list[float], float]:
        """Numbers of query tokens, their seconds with one pick, and the seconds of each further pick."""
        lanes, forward = [1], [self._measure(num_rows, 1, 1)]
        while lanes[-1] < self._most_lanes and (forward[-1] < _LONGEST_MEASURED or len(lanes) < 3):
            lanes.append(min(lanes[-1] * 2, self._most_lanes))
            forward.append(self._measure(num_rows, lanes[-1], 1))
        # No step reads more logits of a row than 2 W - 1, and its query tokens may be the square of W.
        most = min(lanes[-1], 2 * math.isqrt(self._most_lanes) - 1)
        head = max(self._measure(num_rows, lanes[-1], most) - forward[-1], 0.0) / max(most - 1, 1)
        return lanes, forward, head


class WindowChooser:
    """Chooses for the rows whose window is automatic, step by step.

    Args:
        block_size: the widest window.
        costs: of a step.
        mode: `verified`, where a step also checks the drafts of the one before, or `tau`.
    """

    def __init__(self, block_size: int, costs: StepCosts, mode: Literal["verified", "tau"]) -> None:
        self._block_size, self._costs, self._mode = block_size, costs, mode
        self._statistics = AcceptanceStatistics(block_size - 1)
        self._num_idle_steps: Counter[bool | None] = Counter()  # of the rows with each wish for branches

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Adds what became of a row's drafts in a step."""
        self._statistics.observe(num_drafts, num_accepted)

    def age(self) -> None:
        """Lets a step pass: what was observed before it counts less."""
        self._statistics.age()

    def choose(self, num_rows: int, branches: bool | None = None) -> WindowChoice:
        """The window of the next step.

        Args:
            num_rows: rows in it.
            branches: whether to draft behind every point of acceptance; None leaves the choice open.
        """
        if self._block_size == 1:
            return ONE_TOKEN
        best = max(self._candidates(branches), key=lambda choice: self._tokens_per_second(choice, num_rows))
        if self._tokens_per_second(best, num_rows) < _MARGIN * self._tokens_per_second(ONE_TOKEN, num_rows):
            best = ONE_TOKEN
        if best.window > 1:
            self._num_idle_steps[branches] = 0
            return best
        # Now and then two steps look whether drafts have become worth while: one drafts, the next one checks.
        num_idle_steps = self._num_idle_steps[branches] = (self._num_idle_steps[branches] + 1) % _STEPS_BETWEEN_TRIALS
        return WindowChoice(2, has_branches=False) if num_idle_steps >= _STEPS_BETWEEN_TRIALS - 2 else ONE_TOKEN

    def _candidates(self, branches: bool | None) -> list[WindowChoice]:
        kinds = [False] if self._mode == "tau" else [False, True] if branches is None else [branches]
        return [WindowChoice(window, kind) for window in range(1, self._block_size + 1) for kind in kinds]

    def _tokens_per_second(self, choice: WindowChoice, num_rows: int) -> float:
        """Expected tokens per second of a row in the long run."""
        width = choice.window
        shares = self._statistics.shares()[: width - 1]
        reached = list(itertools.accumulate(shares, lambda before, share: before * share, initial=1.0))
        kept, all_right = sum(reached), reached[-1]
        if self._mode == "tau":
            # The tokens that the last step kept stand before the placeholders.
            return kept / self._costs.seconds(num_rows, kept + width - 1, width)
        if choice.has_branches:
            return kept / self._costs.seconds(num_rows, width * width, 2 * width - 1)
        # A step whose drafts are not all right leaves none for the next, which then keeps one token.
        share_with_drafts = 1 / (2 - all_right)
        tokens = share_with_drafts * kept + (1 - share_with_drafts)
        seconds = share_with_drafts * self._costs.seconds(num_rows, 2 * width - 1, 2 * width - 1)
        seconds += (1 - share_with_drafts) * self._costs.seconds(num_rows, width, width)
        return tokens / seconds
