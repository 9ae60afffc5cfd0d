"""Several ways of decoding on the same rows, in turns: seconds, and which of them gave the tokens that they must."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.decoding_methods import Decoded, Engines, Method, continuous_batching_method, generate_method
from benchmarks.decoding_models import Subject
from benchmarks.decoding_oracles import Differences, compare
from benchmarks.decoding_work import Work
from workers.decoding.statistics import RunStatistics

GENERATE, CONTINUOUS = "generate", "continuous_batching"
ONE_TOKEN, ONE_TOKEN_BLOCK = "one_token", "one_token_block"
AUTO, AUTO_NEVER_RIGHT, TAU, TAU_BLOCK = "verified_auto", "verified_auto_never_right", "tau", "tau_block"
WINDOWS = (2, 4, 8)
TAU_THRESHOLD = 0.95
AGREEMENT = 0.7  # of the drafts of an untrained model
WARM_UP_ROWS, WARM_UP_TOKENS = 4, 3


def fixed_windows(block_size: int, widest_branched: int = max(WINDOWS)) -> dict[str, dict[str, Any]]:
    """Settings of verified decoding with each window up to the block size, without and, up to `widest_branched`, with branches.

    A window of 1 is one-token decoding.
    """
    settings: dict[str, dict[str, Any]] = {}
    for window in (window for window in WINDOWS if window <= block_size):
        for has_branches in (False, True) if window <= widest_branched else (False,):
            name = f"verified_{window}" + ("_branches" if has_branches else "")
            settings[name] = {"mode": "verified", "window": window, "draft_branches": has_branches}
    return settings


def batch_methods(engines: Engines) -> dict[str, Method]:
    """One-token decoding against a static batch, and between our caches."""
    return {
        GENERATE: generate_method(engines.subject, engines.batch_size),
        ONE_TOKEN: engines.method("ragged", mode="one_token"),
        ONE_TOKEN_BLOCK: engines.method("block", mode="one_token"),
    }


def ragged_methods(engines: Engines) -> dict[str, Method]:
    """One-token decoding against both ways of `transformers`."""
    subject, batch_size = engines.subject, engines.batch_size
    return {
        GENERATE: generate_method(subject, batch_size),
        CONTINUOUS: continuous_batching_method(subject, batch_size, engines.max_length),
        ONE_TOKEN: engines.method("ragged", mode="one_token"),
    }


def window_methods(engines: Engines, *, is_quick: bool) -> dict[str, Method]:
    """One-token decoding, the automatic window and the fixed ones. Drafts of an untrained model are replaced."""
    subject = engines.subject
    agreement = None if subject.is_trained else AGREEMENT
    fixed = fixed_windows(subject.block_size, min(WINDOWS) if is_quick else max(WINDOWS))
    methods = {
        ONE_TOKEN: engines.method("ragged", mode="one_token"),
        AUTO: engines.method("ragged", agreement=agreement, mode="verified", window="auto"),
        **{name: engines.method("ragged", agreement=agreement, **settings) for name, settings in fixed.items()},
    }
    if subject.is_trained:
        methods[TAU] = engines.method("ragged", mode="tau", threshold=TAU_THRESHOLD)
        methods[TAU_BLOCK] = engines.method("block", mode="tau", threshold=TAU_THRESHOLD)
    elif not is_quick:
        methods[AUTO_NEVER_RIGHT] = engines.method("ragged", agreement=0.0, mode="verified", window="auto")
    return methods


def reference_of(name: str) -> str | None:
    """The method whose tokens this one must give; None where no other says what they are."""
    if name in (ONE_TOKEN, CONTINUOUS):
        return GENERATE
    return ONE_TOKEN if name == ONE_TOKEN_BLOCK or name.startswith("verified") else None


class Comparison:
    """Repeated runs of several methods on the same work, in turns.

    Args:
        subject: the model.
        batch_size: rows that are decoded at the same time.
        kind: of the work, for the tables.
        methods: by name.
    """

    def __init__(self, subject: Subject, batch_size: int, kind: str, methods: dict[str, Method]) -> None:
        self.batch_size, self.kind = batch_size, kind
        self._subject, self._methods = subject, methods
        self.results: dict[str, list[Decoded]] = {name: [] for name in methods}
        self.differences: dict[str, Differences] = {}

    def run(self, work: Work, num_repeats: int, told: Callable[[str], None]) -> None:
        """Untimed runs of each method, then all methods on the same work in each repeat, in an order that turns.

        Drafts that are replaced are drawn anew for each repeat.
        """
        self._warm_up(work)
        names = list(self._methods)
        for repeat in range(num_repeats):
            drawn = replace(work, seed=repeat)
            turn = repeat * len(names) // num_repeats
            for name in names[turn:] + names[:turn]:
                self.results[name].append(self._methods[name](drawn))
            self._check(drawn)
            told(f"batch {self.batch_size}, {self.kind} work: {repeat + 1} of {num_repeats} repeats")

    def _warm_up(self, work: Work) -> None:
        """A few tokens of the first rows; one-token decoding runs the whole work where others must know the true tokens.

        The automatic window sees each number of rows for which it measures costs: that is not part of any repeat.
        """
        has_drafts = any(name.startswith("verified") for name in self._methods)
        for name, method in sorted(self._methods.items(), key=lambda item: item[0] != ONE_TOKEN):
            if name == ONE_TOKEN and has_drafts:
                method(work)
                continue
            num_rows = self.batch_size if name.startswith(AUTO) else min(self.batch_size, WARM_UP_ROWS)
            while num_rows:
                method(work.start(num_rows, WARM_UP_TOKENS))
                num_rows = num_rows // 2 if name.startswith(AUTO) else 0

    def _check(self, work: Work) -> None:
        for name, results in self.results.items():
            reference = reference_of(name)
            if reference in self.results:
                expected = self.results[reference][-1].answers
                found = compare(self._subject, work, expected, results[-1].answers)
                self.differences[name] = self.differences.get(name, Differences()) + found

    def speedups(self, fast: str, slow: str) -> list[float]:
        """How many times as many tokens a second `fast` gives as `slow`, for each repeat: both had the same rows."""
        pairs = zip(self.results[slow], self.results[fast], strict=True)
        return [slower.seconds_per_token / faster.seconds_per_token for slower, faster in pairs]

    def overhead_shares(self, name: str) -> list[float]:
        """The share of the engine's steps that is not the model's forward, for each repeat."""
        counts = [result.statistics for result in self.results[name] if result.statistics is not None]
        return [each.engine_seconds / (each.engine_seconds + each.model_seconds) for each in counts]

    def tokens_per_forward(self, name: str) -> list[float]:
        """Of a method of ours, for each repeat."""
        return [result.statistics.tokens_per_forward for result in self.results[name] if result.statistics is not None]

    def best_fixed(self) -> str:
        """The fixed window of verified decoding with the fewest seconds per token in the median over the repeats."""
        fixed = [name for name in self.results if name in fixed_windows(self._subject.block_size)]
        return min([ONE_TOKEN, *fixed], key=self._seconds_per_token)

    def _seconds_per_token(self, name: str) -> float:
        return statistics.median(result.seconds_per_token for result in self.results[name])

    def rows(self) -> list[list[Any]]:
        """One line of the table for each method."""
        rows = []
        for name, results in self.results.items():
            speeds = [1 / result.seconds_per_token for result in results]
            merged = RunStatistics()
            for result in results:
                merged.add(result.statistics or RunStatistics())
            is_ours = merged.num_row_forwards > 0
            rows.append(
                [
                    self.batch_size,
                    self.kind,
                    name,
                    statistics.median(speeds),
                    f"{min(speeds):.1f}..{max(speeds):.1f}",
                    statistics.median(result.seconds for result in results),
                    statistics.median(result.wall_seconds for result in results),
                    merged.tokens_per_forward if is_ours else None,
                    merged.query_tokens_per_token if is_ours else None,
                    str(self.differences[name]) if name in self.differences else None,
                ]
            )
        return rows


HEADERS = (
    "batch",
    "work",
    "method",
    "tokens/s",
    "min..max",
    "seconds",
    "wall",
    "tokens/forward",
    "query tokens/token",
    "rows with other tokens",
)
