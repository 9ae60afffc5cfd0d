"""Progress of a job: a bar on a terminal, plain lines in a log."""

import logging
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 5.0
_logger = logging.getLogger(__name__)


class Progress:
    """Counts up to `total`. Use as a context manager.

    Args:
        title: what is being done.
        total: how many units there are.
        unit: what is counted, in the plural.
    """

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._bar = tqdm(total=total, desc=title, unit=f" {unit}") if sys.stderr.isatty() else None
        self._last_line = float("-inf")

    def update(self, done: int, note: str = "") -> None:
        """Shows that `done` units are finished, with a few figures behind it."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if done >= self._total or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            _logger.info("%s: %d/%d %s%s", self._title, done, self._total, self._unit, f"  {note}" if note else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
