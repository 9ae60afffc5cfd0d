"""A pool of inference actors that hold a model, and the loop that feeds them units.

Plain Ray actors, not Ray Data's actor pool: there, errors are tolerated per block and not per row, a tolerated error can
lose every row of a job that still succeeds, and what a block's output is called does not follow from its input, so a rerun
doubles rows or leaves partial ones. Here a unit is the only thing that can fail, its files are named after it, and it is
done when its manifest entry is there.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from pipelines.cluster import missing_resource
from pipelines.inference_actor import InferenceActor, ModelSetup
from pipelines.manifest import UnitEntry
from pipelines.pool_member import Call, CallKind, Member
from pipelines.pool_usage import PoolUsage, Work, should_grow
from pipelines.unit_output import OutputTask
from pipelines.unit_queue import UnitQueue
from pipelines.work_units import UnitRows
from workers.config import ActorSettings, DecodingSettings
from workers.errors import InputError

# A second unit is at the actor before the first is done, so its rows take the slots that the first leaves empty.
_UNITS_PER_ACTOR = 2
_SECONDS_OF_A_WAIT, _SECONDS_BETWEEN_LOOKS, _SECONDS_OF_LAST_LOOK = 1.0, 5.0, 10.0
_SECONDS_BETWEEN_WARNINGS = 30.0
# An actor beyond `actors.min` that has no place after the first time is given up, and asked for again after the second.
SECONDS_FOR_EXTRA, SECONDS_UNTIL_EXTRA = 30.0, 60.0
_DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, ObjectLostError)
_logger = logging.getLogger(__name__)


class PoolError(RuntimeError):
    """Actors died too often."""


class InferencePool:
    """Actors with a loaded model, between `actors.min` and `actors.max`. Use as a context manager; the actors end with it.

    Attributes:
        num_restarts: actors that were replaced.
        trace: (seconds since the start, actors that are ready) at each change.
    """

    def __init__(self, setup: ModelSetup, decoding: DecodingSettings, actors: ActorSettings) -> None:
        self._setup, self._decoding, self._actors = setup, decoding, actors
        self._members: list[Member] = []
        self._gone: list[Member] = []
        self._waiting: dict[Any, Call] = {}
        self._num_deaths: Counter[str] = Counter()
        self._started = self._warned = time.monotonic()
        self._next_extra = 0.0
        self._taken = PoolUsage()
        self.num_restarts = 0
        self.trace: list[tuple[float, int]] = []

    def run(self, units: Iterator[UnitRows], task: OutputTask, num_units: int) -> Iterator[UnitEntry]:
        """Decodes all units and yields their entries in order of finishing.

        A lost actor is replaced, and so is one that has units and makes no step for `actors.seconds_without_step`; its units run
        again, each alone on its actor: so the one that kills is told from its neighbours.

        Raises:
            InputError: what an actor found wrong with the model folder or a setting, or no room for `actors.min` actors.
            PoolError: the actor of one unit, or a loading actor, died more than `max_restarts` times.
        """
        queue = UnitQueue(units, num_units)
        while True:
            self._hand_out(queue, task)
            if not any(call.kind == "unit" for call in self._waiting.values()) and self._num_ready:
                return
            self._resize(len(queue))
            yield from self._collect(queue)

    def wait_until_ready(self, *, everybody: bool) -> None:
        """Returns when one actor, or everybody, has loaded the model; raises as `run` does."""
        while not self._num_ready or (everybody and not all(member.is_ready for member in self._members)):
            self._collect(UnitQueue(iter(()), 0))
            self._give_up_places()

    def take_usage(self) -> PoolUsage:
        """What the pool was used for since the last call, or since its start."""
        looks = {member.handle.look.remote(): member for member in self._members if member.is_ready}
        done, _ = ray.wait(list(looks), num_returns=len(looks), timeout=_SECONDS_OF_LAST_LOOK) if looks else ([], [])
        for reference in done:
            try:
                looks[reference].see(ray.get(reference))
            except _DEATHS:  # what it has last said counts
                continue
        everybody = [*self._gone, *self._members]
        usage = PoolUsage(sum(each.seconds for each in everybody), sum((each.work for each in everybody), Work()))
        before, self._taken = self._taken, usage
        return usage - before

    @property
    def _num_ready(self) -> int:
        return sum(member.is_ready for member in self._members)

    def _collect(self, queue: UnitQueue) -> list[UnitEntry]:
        """Waits until something has ended, a second at most; the units of dead and of hung actors become suspects."""
        done, _ = ray.wait(list(self._waiting), num_returns=1, timeout=_SECONDS_OF_A_WAIT)
        entries = []
        for reference in done:
            call = self._waiting.pop(reference)
            try:
                value = ray.get(reference)
            except RayTaskError as error:
                if isinstance(error.cause, InputError):
                    raise error.cause from error
                raise
            except _DEATHS as error:
                self._bury(call, queue, error)
                continue
            if call.kind == "unit":
                call.member.num_units -= 1
                call.member.has_suspect = False
                call.member.note_change()
                entries.append(value)
            else:
                self._note(call, value)
        self._watch(queue)
        return entries

    def _note(self, call: Call, value: Any) -> None:
        if call.kind == "place":
            call.member.place()
        elif call.kind == "look":
            call.member.see(value)
        else:
            call.member.load()
            self._record()
            _logger.info("an actor has loaded the model in %.1f s", value)

    def _watch(self, queue: UnitQueue) -> None:
        """Asks the actors what they have done; replaces those that stand still. Says so when nobody is ready."""
        now, limit = time.monotonic(), self._actors.seconds_without_step
        if not self._num_ready and now - self._warned > _SECONDS_BETWEEN_WARNINGS:
            self._warned = now
            _logger.warning("no actor is ready yet: %s", missing_resource(self._actors) or "the model is being loaded")
        for member in [member for member in self._members if member.is_ready]:
            if not member.is_looked_at and now - member.looked_at > min(_SECONDS_BETWEEN_LOOKS, limit / 4):
                member.is_looked_at, member.looked_at = True, now
                self._ask(member, "look")
            if member.num_units and now - member.changed_at > limit:
                ray.kill(member.handle)
                hung = TimeoutError(f"no step for {limit:g} seconds (actors.seconds_without_step)")
                calls = [(reference, call) for reference, call in self._waiting.items() if call.member is member]
                for reference, call in calls:
                    del self._waiting[reference]
                    self._bury(call, queue, hung)

    def _hand_out(self, queue: UnitQueue, task: OutputTask) -> None:
        """Fills the actors evenly: everybody has a first unit before anybody has a second."""
        for num_units in range(_UNITS_PER_ACTOR):
            for member in self._members:
                if not member.is_ready or member.has_suspect or member.num_units != num_units:
                    continue
                member.has_suspect = num_units == 0 and bool(queue.suspects)
                unit = queue.suspects.popleft() if member.has_suspect else queue.next_new()
                if unit is None:
                    return
                if not num_units:
                    member.note_change()
                member.num_units += 1
                self._waiting[member.handle.decode_unit.remote(task, unit)] = Call(member, "unit", unit)

    def _resize(self, num_queued: int) -> None:
        """Starts one more actor when units wait; at the tail, ends those that have nothing to do."""
        self._give_up_places()
        if num_queued:
            num_places = sum(_UNITS_PER_ACTOR - each.num_units for each in self._members if not each.has_suspect)
            num_placing = sum(not member.is_placed for member in self._members)
            if time.monotonic() > self._next_extra and should_grow(
                num_actors=len(self._members),
                largest=self._actors.largest,
                num_placing=num_placing,
                num_queued=num_queued,
                num_idle_places=num_places,
            ):
                self._start_member()
            return
        latest = time.monotonic() - self._actors.seconds_idle
        for member in sorted(self._members, key=lambda member: member.is_ready):
            is_idle = not member.num_units and member.changed_at <= latest
            if len(self._members) > self._actors.min and (is_idle or not member.is_ready):
                self._release(member)

    def _give_up_places(self) -> None:
        """Lets go of extra actors that have no place.

        Raises:
            InputError: the actors that the job cannot do without have none either.
        """
        for member in [member for member in self._members if not member.is_placed]:
            seconds = time.monotonic() - member.asked_at
            if len(self._members) > self._actors.min:
                if seconds > SECONDS_FOR_EXTRA:
                    self._next_extra = time.monotonic() + SECONDS_UNTIL_EXTRA
                    _logger.info(
                        "going on with %d actors: %s", self._num_ready, missing_resource(self._actors) or "no room"
                    )
                    self._release(member)
            elif seconds > self._actors.seconds_to_place:
                found = f"{self._actors.min}, with room for {sum(each.is_placed for each in self._members)}"
                missing = missing_resource(self._actors) or "a node that has all of it"
                advice = f"Missing: {missing}. Wait until other jobs end, or ask for fewer or smaller actors."
                raise InputError("actors.min", found, f"a place within {seconds:.0f} s", advice)

    def _release(self, member: Member) -> None:
        ray.kill(member.handle)
        self._waiting = {reference: call for reference, call in self._waiting.items() if call.member is not member}
        self._remove(member)

    def _remove(self, member: Member) -> None:
        member.leave()
        self._members.remove(member)
        self._gone.append(member)
        self._record()

    def _record(self) -> None:
        self.trace.append((round(time.monotonic() - self._started, 1), self._num_ready))

    def _start_member(self) -> None:
        options = {
            "num_cpus": self._actors.num_cpus,
            "num_gpus": self._actors.num_gpus,
            "memory": self._actors.memory_bytes,
            "max_restarts": 0,
            "max_concurrency": _UNITS_PER_ACTOR + 2,
        }
        member = Member(ray.remote(InferenceActor).options(**options).remote(self._setup, self._decoding))
        self._members.append(member)
        self._ask(member, "place")
        self._ask(member, "load")

    def _ask(self, member: Member, kind: CallKind) -> None:
        self._waiting[getattr(member.handle, kind).remote()] = Call(member, kind)

    def _bury(self, call: Call, queue: UnitQueue, error: RayError | TimeoutError) -> None:
        """Counts a death against what the actor was doing, and replaces the actor when this is the first sign of it."""
        if call.kind in ("unit", "load"):
            self._num_deaths[call.what] += 1
            _logger.warning("an actor died during %s: %s", call.what, " ".join(str(error).split())[:300])
            if self._num_deaths[call.what] > self._actors.max_restarts:
                found = f"actors died {self._num_deaths[call.what]} times during {call.what}"
                raise PoolError(f"{found}; actors.max_restarts is {self._actors.max_restarts}") from error
        if call.unit is not None:
            queue.suspects.append(call.unit)
        if not call.member.is_gone:
            ray.kill(call.member.handle)  # it may only be out of reach, and would keep its place
            self._remove(call.member)
            self.num_restarts += 1
            self._start_member()

    def __enter__(self) -> Self:
        for _ in range(self._actors.first):
            self._start_member()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members:
            ray.kill(member.handle)
