"""A pool of inference actors that hold a model, and the loop that feeds them units.

Plain Ray actors, not Ray Data's actor pool: there, errors are tolerated per block and not per row, a tolerated error can
lose every row of a job that still succeeds, and what a block's output is called does not follow from its input, so a rerun
doubles rows or leaves partial ones. Here a unit is the only thing that can fail, its files are named after it, and it is
done when its manifest entry is there.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from pipelines.inference_actor import InferenceActor, ModelSetup, OutputTask
from pipelines.manifest import UnitEntry
from pipelines.work_units import UnitRows
from workers.config import ActorSettings, DecodingSettings
from workers.errors import InputError

# A second unit is at the actor before the first is done, so its rows take the slots that the first leaves empty.
_UNITS_PER_ACTOR = 2
_SECONDS_BETWEEN_WARNINGS = 30.0
_DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, ObjectLostError)
_logger = logging.getLogger(__name__)


class PoolError(RuntimeError):
    """Actors died too often."""


class _Member:
    """One actor: not ready until its model is loaded."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.is_ready = False
        self.is_dead = False
        self.num_units = 0
        self.has_suspect = False


class InferencePool:
    """Actors with a loaded model. Use as a context manager; the actors end with it.

    Args:
        setup: the model.
        decoding: settings of the engine.
        actors: how many, with which resources, and how often they may die.
    """

    def __init__(self, setup: ModelSetup, decoding: DecodingSettings, actors: ActorSettings) -> None:
        self._setup, self._decoding, self._actors = setup, decoding, actors
        self._members: list[_Member] = []
        self._waiting: dict[Any, tuple[_Member, UnitRows | None]] = {}  # a None unit stands for loading
        self._num_deaths: Counter[str] = Counter()
        self.num_restarts = 0

    def run(self, units: Iterator[UnitRows], task: OutputTask) -> Iterator[UnitEntry]:
        """Decodes all units and yields their entries in order of finishing.

        A lost actor is replaced and its units run again, each alone on its actor: so the one that kills is told from its
        neighbours.

        Raises:
            InputError: what an actor found wrong with the model folder or a setting.
            PoolError: the actor of one unit, or a loading actor, died more than `max_restarts` times.
        """
        suspects: deque[UnitRows] = deque()
        while True:
            self._hand_out(units, suspects, task)
            if not any(unit is not None for _, unit in self._waiting.values()) and self._is_any_ready():
                return
            yield from self._collect(suspects)

    def wait_until_ready(self, *, everybody: bool) -> None:
        """Returns when one actor, or everybody, has loaded the model; raises as `run` does."""
        while not self._is_any_ready() or (everybody and not all(member.is_ready for member in self._members)):
            self._collect(deque())

    def _collect(self, suspects: deque[UnitRows]) -> list[UnitEntry]:
        """Waits until something has ended; the units of dead actors go to `suspects`."""
        done, _ = ray.wait(list(self._waiting), num_returns=1, timeout=_SECONDS_BETWEEN_WARNINGS)
        if not done and not self._is_any_ready():
            _logger.warning("no actor is ready yet: %s", self._placement())
        entries = []
        for reference in done:
            member, unit = self._waiting.pop(reference)
            try:
                value = ray.get(reference)
            except RayTaskError as error:
                if isinstance(error.cause, InputError):
                    raise error.cause from error
                raise
            except _DEATHS as error:
                self._bury(member, unit, error)
                if unit is not None:
                    suspects.append(unit)
                continue
            if unit is None:
                member.is_ready = True
                _logger.info("an actor has loaded the model in %.1f s", value)
            else:
                member.num_units -= 1
                member.has_suspect = False
                entries.append(value)
        return entries

    def _hand_out(self, units: Iterator[UnitRows], suspects: deque[UnitRows], task: OutputTask) -> None:
        """Fills the actors evenly: everybody has a first unit before anybody has a second."""
        for num_units in range(_UNITS_PER_ACTOR):
            for member in self._members:
                if not member.is_ready or member.has_suspect or member.num_units != num_units:
                    continue
                member.has_suspect = num_units == 0 and bool(suspects)
                unit = suspects.popleft() if member.has_suspect else next(units, None)
                if unit is None:
                    return
                member.num_units += 1
                self._waiting[member.handle.decode_unit.remote(task, unit)] = (member, unit)

    def _is_any_ready(self) -> bool:
        return any(member.is_ready for member in self._members)

    def _start_member(self) -> None:
        options = {
            "num_cpus": self._actors.num_cpus,
            "num_gpus": self._actors.num_gpus,
            "max_restarts": 0,
            "max_concurrency": _UNITS_PER_ACTOR + 1,
        }
        member = _Member(ray.remote(InferenceActor).options(**options).remote(self._setup, self._decoding))
        self._members.append(member)
        self._waiting[member.handle.load.remote()] = (member, None)

    def _bury(self, member: _Member, unit: UnitRows | None, error: RayError) -> None:
        """Counts a death against what the actor was doing, and replaces the actor when this is the first sign of it."""
        what = "loading the model" if unit is None else f"unit {unit.unit.name}"
        self._num_deaths[what] += 1
        _logger.warning("an actor died during %s: %s", what, " ".join(str(error).split())[:300])
        if self._num_deaths[what] > self._actors.max_restarts:
            found = f"actors died {self._num_deaths[what]} times during {what}"
            raise PoolError(f"{found}; actors.max_restarts is {self._actors.max_restarts}") from error
        if not member.is_dead:
            member.is_dead = True
            self._members.remove(member)
            self.num_restarts += 1
            self._start_member()

    def _placement(self) -> str:
        wanted = f"{self._actors.num_cpus:g} CPUs and {self._actors.num_gpus:g} GPUs each"
        free = ray.available_resources()
        return f"{wanted} are wanted, {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"

    def __enter__(self) -> Self:
        for _ in range(self._actors.num_actors):
            self._start_member()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members:
            ray.kill(member.handle)
