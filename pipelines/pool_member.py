"""One actor of the pool as the driver sees it."""

import time
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.pool_usage import Work
from pipelines.work_units import UnitRows

CallKind = Literal["place", "load", "look", "unit"]


class Member:
    """One actor: first Ray finds a place for its process, then it loads the model, then it is ready."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.is_placed = self.is_ready = self.is_gone = False
        self.num_units = 0
        self.has_suspect = False
        self.is_looked_at = False
        self.work = Work()
        self.asked_at = time.monotonic()
        self._placed_at: float | None = None
        self._seconds = 0.0
        self.changed_at = self.looked_at = self.asked_at

    def place(self) -> None:
        """Its process runs."""
        if not self.is_placed:
            self.is_placed, self._placed_at = True, time.monotonic()

    def load(self) -> None:
        """Its model is loaded."""
        self.place()
        self.is_ready = True
        self.note_change()

    def note_change(self) -> None:
        """It has made progress, or has begun or ended something: the watchdog counts from here, and so does idleness."""
        self.changed_at = time.monotonic()

    def see(self, work: Work) -> None:
        """Takes in what it says that it has done so far."""
        self.is_looked_at = False
        if work.num_advances != self.work.num_advances:
            self.note_change()
        self.work = work

    def leave(self) -> None:
        """It is no longer there."""
        self._seconds = self.seconds
        self.is_gone, self._placed_at = True, None

    @property
    def seconds(self) -> float:
        """How long its process has run."""
        return self._seconds if self._placed_at is None else time.monotonic() - self._placed_at


@dataclass(frozen=True)
class Call:
    """What an actor has been asked for."""

    member: Member
    kind: CallKind
    unit: UnitRows | None = None

    @property
    def what(self) -> str:
        """For messages."""
        return "loading the model" if self.unit is None else f"unit {self.unit.unit.name}"
