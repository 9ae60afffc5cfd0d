"""Rows and tokens over time: a line of progress, and a chart that has a bounded number of points however long a job runs."""

from collections.abc import Sequence

from pipelines.manifest import Totals
from pipelines.stage_summary import duration

_MOST_POINTS = 2000
_NUM_SPANS = 60


class Throughput:
    """Collects how many tokens there are when."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._spacing = 0.0

    def add(self, seconds: float, num_tokens: int) -> None:
        """There are so many tokens in sum so many seconds after the start; later calls have larger numbers."""
        if len(self._points) > 1 and seconds - self._points[-2][0] < self._spacing:
            self._points.pop()
        self._points.append((seconds, num_tokens))
        if len(self._points) > _MOST_POINTS:
            points, self._points = self._points, []
            self._spacing = 2 * seconds / _MOST_POINTS
            for point in points:
                self.add(*point)

    def over_time(self) -> list[list[float]]:
        """(seconds at its end, tokens per second in it) of equal spans of the time, at most one for each point."""
        return tokens_per_second(self._points, min(_NUM_SPANS, len(self._points)))


def tokens_per_second(points: Sequence[tuple[float, int]], num_spans: int) -> list[list[float]]:
    """The rate in each of `num_spans` equal spans from 0 to the last point; tokens count at the moment when they are told."""
    if not points or points[-1][0] <= 0:
        return []
    width = points[-1][0] / num_spans
    tokens = [0] * num_spans
    before = 0
    for seconds, num_tokens in points:
        tokens[min(num_spans - 1, int(seconds / width))] += num_tokens - before
        before = num_tokens
    return [[round((index + 1) * width, 2), round(count / width, 2)] for index, count in enumerate(tokens)]


def progress_note(before: Totals, now: Totals, num_rows: int, seconds: float) -> str:
    """The pace of this start in words: rows and tokens per second, tokens per forward, errors, time left.

    Args:
        before: what earlier starts had done.
        num_rows: of the whole set.
        seconds: since this start began to decode.
    """
    rows_per_second = (now.num_rows - before.num_rows) / seconds
    num_tokens = now.num_generated_tokens - before.num_generated_tokens
    num_forwards = now.num_forwards - before.num_forwards
    words = [
        f"{rows_per_second:.1f} rows/s",
        f"{num_tokens / seconds:.0f} tokens/s",
        f"{num_tokens / max(1, num_forwards):.2f} tokens/forward",
        f"{now.errors.total()} errors",
    ]
    num_left = num_rows - now.num_rows
    return ", ".join(words + [f"{duration(num_left / rows_per_second)} left"] * bool(num_left and rows_per_second))
