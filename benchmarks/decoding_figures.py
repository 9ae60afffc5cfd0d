"""What a run of the decoding benchmark says: medians by batch size, and single numbers.

Ratios above 1 mean that the method named first is faster, but for `window_cost`, which is seconds by seconds.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.decoding_comparison import (
    AUTO,
    AUTO_NEVER_RIGHT,
    CONTINUOUS,
    GENERATE,
    ONE_TOKEN,
    ONE_TOKEN_BLOCK,
    TAU,
    TAU_BLOCK,
    Comparison,
)
from benchmarks.decoding_costs import StepCosts

Values = list[float]
KEEP_ONE = (GENERATE, ONE_TOKEN, ONE_TOKEN_BLOCK)  # token of a forward
HEADERS = ("figure", "batch", "median", "least", "largest")


@dataclass(frozen=True)
class BatchRuns:
    """What was run at one batch size; `windows` may be the same as `equal`."""

    equal: Comparison
    windows: Comparison
    costs: StepCosts

    def figures(self) -> dict[str, Values | dict[str, Values]]:
        """By name, one value for each repeat."""
        equal, windows = self.equal, self.windows
        values: dict[str, Values | dict[str, Values]] = {
            "one_token_vs_generate": equal.speedups(ONE_TOKEN, GENERATE),
            "ragged_cache_vs_block_cache": equal.speedups(ONE_TOKEN, ONE_TOKEN_BLOCK),
            "auto_window_vs_one_token": windows.speedups(AUTO, ONE_TOKEN),
            "auto_window_vs_best_fixed": windows.speedups(AUTO, windows.best_fixed()),
            "window_cost": {str(window): ratios for window, ratios in self.costs.ratios().items() if window > 1},
            "tokens_per_forward": windows.tokens_per_forward(AUTO),
            "tokens_per_forward_by_method": {
                name: windows.tokens_per_forward(name) for name in windows.results if name not in KEEP_ONE
            },
        }
        if AUTO_NEVER_RIGHT in windows.results:
            values["auto_window_vs_one_token_never_right"] = windows.speedups(AUTO_NEVER_RIGHT, ONE_TOKEN)
        if TAU in windows.results:
            values["tau_vs_one_token"] = windows.speedups(TAU, ONE_TOKEN)
            values["ragged_cache_vs_block_cache_tau"] = windows.speedups(TAU, TAU_BLOCK)
        return values


class Figures:
    """All figures of one model.

    Args:
        batches: by batch size.
        ragged: the runs of ragged work.
    """

    def __init__(self, batches: Mapping[int, BatchRuns], ragged: Comparison) -> None:
        self._batches, self._ragged = batches, ragged
        self._by_batch = {str(size): runs.figures() for size, runs in batches.items()}
        self._numbers = {
            "ragged_prompts_vs_generate": ragged.speedups(ONE_TOKEN, GENERATE),
            "continuous_vs_generate_batch": ragged.speedups(ONE_TOKEN, CONTINUOUS),
            "engine_overhead_share": ragged.overhead_shares(ONE_TOKEN),
        }

    @property
    def comparisons(self) -> list[Comparison]:
        """All of them, each once."""
        runs = [each for batch in self._batches.values() for each in (batch.equal, batch.windows)]
        return [*dict.fromkeys(runs), self._ragged]

    @property
    def num_wrong(self) -> int:
        """Rows of all comparisons whose tokens rounding does not explain."""
        return sum(found.num_wrong for each in self.comparisons for found in each.differences.values())

    def rows(self) -> list[list[Any]]:
        """One line of the table for each figure."""
        rows: list[list[Any]] = []
        for size, figures in self._by_batch.items():
            for name, values in figures.items():
                parts = {f", {key}": each for key, each in values.items()} if isinstance(values, dict) else {"": values}
                rows += [[name + part, size, *spread(each)] for part, each in parts.items()]
        return rows + [[name, "-", *spread(values)] for name, values in self._numbers.items()]

    def values(self) -> dict[str, Any]:
        """Medians under their names, least and largest under `..._spread`."""
        values: dict[str, Any] = {}
        names = dict.fromkeys(name for figures in self._by_batch.values() for name in figures)
        for name in names:
            by_size = {size: figures[name] for size, figures in self._by_batch.items() if name in figures}
            values[name] = _each(by_size, 0)
            values[f"{name}_spread"] = _each(by_size, slice(1, 3))
        for name, repeats in self._numbers.items():
            values[name], values[f"{name}_spread"] = _each(repeats, 0), _each(repeats, slice(1, 3))
        values["best_fixed"] = {str(size): runs.windows.best_fixed() for size, runs in self._batches.items()}
        values["rows_with_other_tokens"] = {
            f"{each.kind}_{each.batch_size}_{name}": [found.num_differing, found.num_rows, found.num_near_ties]
            for each in self.comparisons
            for name, found in each.differences.items()
        }
        return values


def _each(values: Any, part: int | slice) -> Any:
    """A part of the spread of every list of repeats."""
    if isinstance(values, dict):
        return {name: _each(each, part) for name, each in values.items()}
    return spread(values)[part]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)
