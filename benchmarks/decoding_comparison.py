"""Several ways of decoding on the same rows, in turns: seconds, and which of them gave the tokens that they must."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.decoding_methods import Decoded, Engines, Method, continuous_batching_method, generate_method
from benchmarks.decoding_models import Subject
from benchmarks.decoding_oracles import Differences, compare
from benchmarks.decoding_work import EQUAL, Work
from workers.decoding.statistics import RunStatistics

GENERATE, CONTINUOUS = "generate", "continuous_batching"
ONE_TOKEN, ONE_TOKEN_BLOCK = "one_token", "one_token_block"
AUTO, TAU, TAU_BLOCK = "verified_auto", "tau", "tau_block"
WINDOWS = (1, 2, 4, 8)
TAU_THRESHOLD = 0.95
Spread = tuple[float, float, float]


def fixed_windows(block_size: int) -> dict[str, dict[str, Any]]:
    """Settings of verified decoding with each window up to the block size, without and with branches; W = 1 has none."""
    settings: dict[str, dict[str, Any]] = {}
    for window in (window for window in WINDOWS if window <= block_size):
        for has_branches in (False, True) if window > 1 else (False,):
            name = f"verified_{window}" + ("_branches" if has_branches else "")
            settings[name] = {"mode": "verified", "window": window, "draft_branches": has_branches}
    return settings


def method_names() -> tuple[str, ...]:
    """All methods that there can be."""
    return (GENERATE, CONTINUOUS, ONE_TOKEN, ONE_TOKEN_BLOCK, AUTO, *fixed_windows(max(WINDOWS)), TAU, TAU_BLOCK)


def make_methods(subject: Subject, batch_size: int, max_length: int, kind: str) -> dict[str, Method]:
    """All methods by name. Drafts are compared on ragged work of a trained model, one-token decoding on all work."""
    engines = Engines(subject, batch_size, max_length)
    methods = {
        GENERATE: generate_method(subject, batch_size),
        CONTINUOUS: continuous_batching_method(subject, batch_size, max_length),
        ONE_TOKEN: engines.method("ragged", mode="one_token"),
        ONE_TOKEN_BLOCK: engines.method("block", mode="one_token"),
    }
    if kind == EQUAL or not subject.is_trained:
        return methods
    fixed = {name: engines.method("ragged", **settings) for name, settings in fixed_windows(subject.block_size).items()}
    return {
        **methods,
        AUTO: engines.method("ragged", mode="verified", window="auto"),
        **fixed,
        TAU: engines.method("ragged", mode="tau", threshold=TAU_THRESHOLD),
        TAU_BLOCK: engines.method("block", mode="tau", threshold=TAU_THRESHOLD),
    }


def reference_of(name: str) -> str | None:
    """The method whose tokens this one must give; None where no other says what they are."""
    if name in (ONE_TOKEN, CONTINUOUS):
        return GENERATE
    return ONE_TOKEN if name == ONE_TOKEN_BLOCK or name.startswith("verified") else None


class Comparison:
    """Repeated runs of several methods on the same works, in turns.

    Args:
        subject: the model.
        batch_size: rows that are decoded at the same time.
        kind: of the works, `equal` or `ragged`.
        methods: by name.
    """

    def __init__(self, subject: Subject, batch_size: int, kind: str, methods: dict[str, Method]) -> None:
        self.batch_size, self.kind = batch_size, kind
        self._subject, self._methods = subject, methods
        self.results: dict[str, list[Decoded]] = {name: [] for name in methods}
        self.differences: dict[str, Differences] = {}

    def run(self, works: Sequence[Work], told: Callable[[str], None]) -> None:
        """One untimed run of each method on the first rows, then one repeat with each work, in an order that turns."""
        first = works[0]
        start = Work(first.prompts[: self.batch_size], first.budgets[: self.batch_size], first.end_ids)
        for method in self._methods.values():
            method(start)
        names = list(self._methods)
        for repeat, work in enumerate(works):
            turn = repeat * len(names) // len(works)
            for name in names[turn:] + names[:turn]:
                self.results[name].append(self._methods[name](work))
            self._check(work)
            told(f"batch {self.batch_size}, {self.kind} work: {repeat + 1} of {len(works)} repeats")

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

    def best_fixed(self) -> str | None:
        """The fixed window of verified decoding with the fewest seconds per token in the median over the repeats."""
        fixed = [name for name in self.results if name in fixed_windows(self._subject.block_size)]
        return min(fixed, key=self._seconds_per_token, default=None)

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


def spread(values: Sequence[float]) -> Spread:
    """Median, least and largest."""
    return round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)


def figures(equal: Comparison, ragged: Comparison) -> dict[str, Any]:
    """What the runs of one batch size say: ratios above 1 mean that the first named is faster; median, least, largest."""
    pairs = {
        f"one_token_vs_{short}_{each.kind}": (each, ONE_TOKEN, other)
        for short, other in (("generate", GENERATE), ("continuous", CONTINUOUS))
        for each in (equal, ragged)
    }
    pairs["ragged_vs_block"] = (ragged, ONE_TOKEN, ONE_TOKEN_BLOCK)
    pairs["ragged_vs_block_tau"] = (ragged, TAU, TAU_BLOCK)
    pairs["auto_vs_one_token"] = (ragged, AUTO, ONE_TOKEN)
    pairs["tau_vs_one_token"] = (ragged, TAU, ONE_TOKEN)
    best = ragged.best_fixed()
    if best is not None:
        pairs["auto_vs_best_fixed"] = (ragged, AUTO, best)
        pairs["best_fixed_vs_one_token"] = (ragged, best, ONE_TOKEN)
    values: dict[str, Any] = {
        name: spread(each.speedups(fast, slow))
        for name, (each, fast, slow) in pairs.items()
        if fast in each.results and slow in each.results
    }
    if ONE_TOKEN in ragged.results:
        values["engine_overhead_share"] = spread(ragged.overhead_shares(ONE_TOKEN))
    if best is not None:
        values["best_fixed"] = best
    values["rows_with_other_tokens"] = {
        f"{name}_{each.kind}": [found.num_differing, found.num_rows, found.num_near_ties]
        for each in (equal, ragged)
        for name, found in each.differences.items()
    }
    return values
