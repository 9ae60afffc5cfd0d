"""The units of a run that no actor has: the stream of new ones, and those whose actor died."""

from collections import deque
from collections.abc import Iterator

from pipelines.work_units import UnitRows


class UnitQueue:
    """Hands out units. `suspects` are units whose actor died: each is to run alone, so that the one that kills is told from others.

    Args:
        units: the new ones, read as they are asked for.
        num_units: how many `units` will be.
    """

    def __init__(self, units: Iterator[UnitRows], num_units: int) -> None:
        self._units, self._num_new = units, num_units
        self.suspects: deque[UnitRows] = deque()

    def __len__(self) -> int:
        return self._num_new + len(self.suspects)

    def next_new(self) -> UnitRows | None:
        """The next unit of the stream, or None at its end."""
        unit = next(self._units, None)
        self._num_new = 0 if unit is None else self._num_new - 1
        return unit
