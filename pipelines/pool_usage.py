"""What a pool of actors was used for: time, and slots. Free of Ray and torch; differences of two looks count what lies between."""

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class Work:
    """What one actor, or several, have done since their model was loaded.

    Attributes:
        num_advances: steps of the engine, units taken in and files written: it stands still when an actor hangs.
        busy_seconds: spent in steps of the engine.
        num_slot_steps, num_slots_in_use: slots there were, and slots with a row, summed over the steps.
    """

    num_advances: int = 0
    busy_seconds: float = 0.0
    num_slot_steps: int = 0
    num_slots_in_use: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class PoolUsage:
    """The use of all actors of a pool.

    Attributes:
        actor_seconds: of all actors from the start of their process to its end, loading included.
        work: the sum of theirs.
    """

    actor_seconds: float = 0.0
    work: Work = Work()

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.actor_seconds - other.actor_seconds, self.work - other.work)

    @property
    def utilisation(self) -> float:
        """The share of the actor-seconds that the engines spent in steps."""
        return self.work.busy_seconds / self.actor_seconds if self.actor_seconds > 0 else 0.0

    @property
    def slot_occupancy(self) -> float:
        """The share of the slots that held a row, over all steps."""
        return self.work.num_slots_in_use / self.work.num_slot_steps if self.work.num_slot_steps else 0.0


def should_grow(*, num_actors: int, largest: int, num_placing: int, num_queued: int, num_idle_places: int) -> bool:
    """Whether a pool starts one more actor: more units wait than the actors that are there or on their way have places for.

    Args:
        num_actors: actors, those on their way included.
        largest: how many there may be.
        num_placing: actors that Ray has found no room for yet; nobody is asked for behind them.
        num_queued: units that nobody has.
        num_idle_places: units that could be handed out at once, or to actors that are loading.
    """
    return num_actors < largest and not num_placing and num_queued > num_idle_places
