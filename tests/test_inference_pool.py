"""The pool of actors: how many there are, who is replaced, and that no unit is lost or told of twice meanwhile.

The actors here have no model: a unit is what they are told to wait for.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines import cluster, inference_pool
from pipelines.inference_pool import InferencePool
from pipelines.manifest import UnitEntry
from pipelines.pool_usage import PoolUsage, Work, should_grow
from pipelines.unit_queue import UnitQueue
from pipelines.work_units import UnitRows, WorkUnit
from workers.config import ActorSettings, DecodingSettings
from workers.errors import InputError


def units(num_units: int) -> Iterator[UnitRows]:
    return (UnitRows(WorkUnit(0, index, index, 1), (), None) for index in range(num_units))


def names(num_units: int) -> list[str]:
    return [unit.unit.name for unit in units(num_units)]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Gives the pool actors without a model; `behaviour(folder, unit)` is what they do for a unit."""

    def install(behaviour: Any) -> None:
        folder = tmp_path

        class Waiter:  # local, so that it travels by value
            def __init__(self, setup: object, decoding: object) -> None:
                self.num_advances = 0

            async def place(self) -> None:
                pass

            async def load(self) -> float:
                (folder / f"loaded-{id(self)}-{time.time_ns()}").touch()
                return 0.0

            async def look(self) -> Work:
                return Work(self.num_advances, 0.0, 4 * self.num_advances, 2 * self.num_advances)

            async def decode_unit(self, task: object, unit_rows: UnitRows) -> UnitEntry:
                await behaviour(folder, unit_rows.unit.index)
                self.num_advances += 1
                return UnitEntry(unit_rows.unit.name, 1, 1, {}, 1, 1, 1)

        monkeypatch.setattr(inference_pool, "InferenceActor", Waiter)

    return install


def pool(**actors: Any) -> InferencePool:
    return InferencePool(None, DecodingSettings(), ActorSettings(**actors))  # type: ignore[arg-type]


def run(members: InferencePool, num_units: int) -> list[str]:
    with members:
        members.wait_until_ready(everybody=False)
        return sorted(entry.unit for entry in members.run(units(num_units), None, num_units))  # type: ignore[arg-type]


def test_a_pool_grows_to_its_most_and_shrinks_to_its_least(ray_session: Any, install: Any, tmp_path: Path) -> None:
    async def wait(folder: Path, index: int) -> None:
        while (index == 11 and not (folder / "shrunk").exists()) or len(list(folder.glob("loaded-*"))) < 3:
            await asyncio.sleep(0.05)

    install(wait)
    members = pool(min=1, max=3, num_cpus=0.5, seconds_idle=0.0)

    def tell_when_shrunk() -> None:
        while [num_ready for _, num_ready in members.trace][-1:] != [1] or len(members.trace) < 5:
            time.sleep(0.05)
        (tmp_path / "shrunk").touch()

    threading.Thread(target=tell_when_shrunk, daemon=True).start()
    assert run(members, 12) == names(12)
    assert [num_ready for _, num_ready in members.trace] == [1, 2, 3, 2, 1]
    assert members.num_restarts == 0
    times = [seconds for seconds, _ in members.trace]
    assert times == sorted(times)


def test_an_extra_actor_without_a_place_stops_nobody(
    ray_session: Any, install: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait(folder: Path, index: int) -> None:
        await asyncio.sleep(0.7)

    install(wait)
    monkeypatch.setattr(inference_pool, "SECONDS_FOR_EXTRA", 1.0)
    members = pool(min=1, max=2, num_cpus=1.5)
    with caplog.at_level(logging.INFO):
        assert run(members, 10) == names(10)
    assert {num_ready for _, num_ready in members.trace} == {1}
    assert "going on with 1 actors: 1.5 CPUs for one actor, 0.5 CPUs free" in caplog.text
    assert caplog.text.count("going on with") == 1  # it is not asked for again at once


def test_actors_that_must_be_there_and_are_not_are_named_with_what_they_lack(ray_session: Any, install: Any) -> None:
    async def wait(folder: Path, index: int) -> None:
        pass

    install(wait)
    with (
        pool(min=2, num_cpus=1.5, seconds_to_place=3.0) as members,
        pytest.raises(
            InputError, match=r"^actors.min: found 2, with room for 1; .*1.5 CPUs for one actor, 0.5 CPUs free"
        ),
    ):
        members.wait_until_ready(everybody=True)


@pytest.mark.parametrize("blocks_the_loop", [True, False])
def test_a_hung_actor_is_replaced(ray_session: Any, install: Any, blocks_the_loop: bool) -> None:
    async def hang(folder: Path, index: int) -> None:
        await asyncio.sleep(0.1)
        if index == 3 and not (folder / "hung").exists():
            (folder / "hung").touch()
            if blocks_the_loop:
                time.sleep(999)
            await asyncio.sleep(999)

    install(hang)
    members = pool(min=1, num_cpus=0.5, seconds_without_step=3.0)
    assert run(members, 6) == names(6)
    assert members.num_restarts == 1


def test_slow_units_are_no_hung_ones(ray_session: Any, install: Any) -> None:
    """The steps of another unit on the same actor count: the engine is one."""

    async def wait(folder: Path, index: int) -> None:
        await asyncio.sleep(4.5 if index == 0 else 1.0)

    install(wait)
    members = pool(min=1, num_cpus=0.5, seconds_without_step=3.0)
    assert run(members, 5) == names(5)
    assert members.num_restarts == 0


def test_usage_counts_actors_and_their_work_once(ray_session: Any, install: Any) -> None:
    async def wait(folder: Path, index: int) -> None:
        await asyncio.sleep(0.2)

    install(wait)
    started = time.monotonic()
    with pool(min=2, num_cpus=0.5) as members:
        members.wait_until_ready(everybody=True)
        list(members.run(units(6), None, 6))  # type: ignore[arg-type]
        first = members.take_usage()
        seconds = time.monotonic() - started
        assert 0.6 <= first.actor_seconds <= 2 * seconds  # two rounds of units
        assert first.work == Work(6, 0.0, 24, 12) and first.slot_occupancy == 0.5
        list(members.run(units(2), None, 2))  # type: ignore[arg-type]
        second = members.take_usage()
        assert second.work.num_advances == 2 and second.actor_seconds < 2 * (time.monotonic() - started - seconds) + 1


def test_a_pool_grows_while_more_units_wait_than_there_are_places() -> None:
    grow = {"num_actors": 2, "largest": 3, "num_placing": 0, "num_queued": 5, "num_idle_places": 4}
    assert should_grow(**grow)
    for changes in ({"num_actors": 3}, {"num_placing": 1}, {"num_queued": 4}):
        assert not should_grow(**{**grow, **changes})


@given(st.integers(0, 9), st.data())
def test_the_queue_knows_how_many_units_nobody_has(num_units: int, data: st.DataObject) -> None:
    queue = UnitQueue(units(num_units), num_units)
    running: list[UnitRows] = []
    taken: Counter[str] = Counter()
    for _ in range(20):
        if running and data.draw(st.booleans()):
            queue.suspects.append(running.pop())
        elif queue.suspects:
            running.append(queue.suspects.popleft())
        elif (unit := queue.next_new()) is not None:
            running.append(unit)
            taken[unit.unit.name] += 1
        assert len(queue) + len(running) == num_units
    assert all(count == 1 for count in taken.values())


def test_usage_is_a_share_of_time_and_of_slots() -> None:
    assert PoolUsage().utilisation == PoolUsage().slot_occupancy == 0.0
    usage = PoolUsage(10.0, Work(3, 4.0, 20, 15)) - PoolUsage(2.0, Work(1, 2.0, 4, 3))
    assert usage == PoolUsage(8.0, Work(2, 2.0, 16, 12))
    assert (usage.utilisation, usage.slot_occupancy) == (0.25, 0.75)


@pytest.mark.parametrize(
    "actors", [{"min": 2, "max": 1}, {"initial": 2}, {"min": 2, "initial": 1, "max": 3}, {"max": 3, "initial": 4}]
)
def test_numbers_of_actors_that_contradict_each_other_are_refused(actors: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="are not in this order"):
        ActorSettings(**actors)


def test_one_number_of_actors_is_enough() -> None:
    fixed = ActorSettings(min=3)
    assert (fixed.first, fixed.largest, fixed.memory_bytes) == (3, 3, None)
    assert (ActorSettings(max=4).first, ActorSettings(max=4, memory=1.5).memory_bytes) == (1, 3 * 2**29)


@pytest.mark.parametrize(
    ("actors", "found"),
    [
        ({"min": 5}, "5 actors of 1 CPUs, with room for 4 on nodes of 2 CPUs, 2 CPUs"),
        ({"min": 2, "num_cpus": 1.5, "num_gpus": 1}, "2 actors of 1 GPUs, with room for 1 on nodes of 0 GPUs, 1 GPUs"),
        (
            {"min": 4, "num_cpus": 1, "memory": 3},
            "4 actors of 3 GiB of memory, with room for 3 on nodes of 8 GiB of memory, 4 GiB",
        ),
        ({"num_cpus": 3}, "1 actors of 3 CPUs, with room for 0"),
        ({"num_gpus": 1, "memory": 6}, "1 actors of 1 CPUs and 1 GPUs and 6 GiB of memory, with room for 0"),
    ],
)
def test_a_pool_that_no_nodes_can_hold_is_refused_with_the_resource(
    monkeypatch: pytest.MonkeyPatch, actors: dict[str, Any], found: str
) -> None:
    resources: list[dict[str, float]] = [
        {"CPU": 2.0, "memory": 8.0 * 2**30},
        {"CPU": 2.0, "GPU": 1.0, "memory": 4.0 * 2**30},
    ]
    nodes = [{"Alive": True, "Resources": each} for each in resources] + [{"Alive": False, "Resources": {"CPU": 99.0}}]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    cluster.require_places(ActorSettings(min=4, max=99))
    cluster.require_places(ActorSettings(num_cpus=0.0))
    with pytest.raises(InputError, match="^actors.min: ") as refusal:
        cluster.require_places(ActorSettings(**actors))
    assert found in str(refusal.value)
