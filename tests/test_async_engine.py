"""Many coroutines, one engine: everybody gets the tokens of a run of their own, and who leaves costs nobody anything."""

import asyncio

import pytest
from scripted_model import END_ID, MASK_ID, ByteTokenizer, Script, ScriptedModel

from workers.config import RowDecodingSettings
from workers.decoding.async_engine import AsyncEngine
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request

SCRIPTS = [Script((10 + place,), tuple(range(20, 25 + 3 * place)) + (END_ID,)) for place in range(6)]


def make_engine(num_slots: int = 2) -> DecodingEngine:
    return DecodingEngine(
        ScriptedModel(*SCRIPTS, last_position=63),
        ByteTokenizer(),
        mask_token_id=MASK_ID,
        end_ids={END_ID},
        block_size=4,
        num_slots=num_slots,
        max_length=64,
    )


def request_of(place: int) -> Request:
    return Request(place, SCRIPTS[place].prompt, RowDecodingSettings(mode="tau", window=1 + place % 3))


def test_everybody_gets_their_own_answer() -> None:
    async def run() -> None:
        engine = AsyncEngine(make_engine())
        results = await asyncio.gather(*(engine.generate(request_of(place)) for place in range(6)))
        assert [result.token_ids for result in results] == [script.tokens for script in SCRIPTS]
        # The thread that stepped has gone to rest; a later request wakes it.
        assert (await engine.generate(request_of(3))).token_ids == SCRIPTS[3].tokens
        assert engine.num_requests == 0

    asyncio.run(run())


def test_a_stream_tells_the_tokens_of_each_step_and_then_the_result() -> None:
    async def run() -> None:
        engine = AsyncEngine(make_engine())
        pieces = [progress async for progress in engine.stream(request_of(2))]
        assert [len(piece.token_ids) for piece in pieces] == [3, 3, 3, 3]
        assert [piece.result is None for piece in pieces] == [True] * 3 + [False]
        assert sum((piece.token_ids for piece in pieces), ()) == SCRIPTS[2].tokens == pieces[-1].result.token_ids

    asyncio.run(run())


def test_a_bad_request_and_a_cancelled_one_cost_nobody_an_answer() -> None:
    """Case 12, without HTTP: four at once, one of them invalid, one cancelled; then four more."""

    async def run() -> None:
        core = make_engine()
        engine = AsyncEngine(core)
        tasks = [asyncio.create_task(engine.generate(request_of(place))) for place in (3, 4, 5)]
        bad = asyncio.create_task(engine.generate(Request("bad", (), RowDecodingSettings())))
        async for _ in engine.stream(request_of(2)):
            break  # reads no further
        tasks[2].cancel()
        assert (await bad).error.code == "empty_prompt"
        assert [(await task).token_ids for task in tasks[:2]] == [SCRIPTS[3].tokens, SCRIPTS[4].tokens]
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        results = await asyncio.gather(*(engine.generate(request_of(place)) for place in (0, 1, 4, 5)))
        assert [result.token_ids for result in results] == [SCRIPTS[place].tokens for place in (0, 1, 4, 5)]
        assert (engine.num_requests, core.has_work) == (0, False)

    asyncio.run(run())


def test_a_model_that_fails_tells_everybody_and_the_next_request_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        core = make_engine()
        engine = AsyncEngine(core)

        def broken() -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(core, "step", broken)
            failures = await asyncio.gather(
                *(engine.generate(request_of(place)) for place in range(4)), return_exceptions=True
            )
        assert [str(failure) for failure in failures] == ["out of memory"] * 4
        assert not core.has_work
        assert (await engine.generate(request_of(1))).token_ids == SCRIPTS[1].tokens

    asyncio.run(run())


def test_a_request_that_cannot_even_be_looked_at_fails_alone() -> None:
    async def run() -> None:
        engine = AsyncEngine(make_engine())
        nonsense = Request("x", ("x",), RowDecodingSettings())
        requests = [request_of(0), nonsense, request_of(1), request_of(2)]
        outcomes = await asyncio.gather(*(engine.generate(each) for each in requests), return_exceptions=True)
        assert isinstance(outcomes[1], TypeError)
        assert [outcomes[place].token_ids for place in (0, 2, 3)] == [SCRIPTS[place].tokens for place in range(3)]

    asyncio.run(run())


def test_who_arrives_while_a_step_fails_is_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        core = make_engine()
        engine = AsyncEngine(core)
        loop, step = asyncio.get_running_loop(), core.step
        late: list[asyncio.Task] = []

        def broken() -> None:
            monkeypatch.setattr(core, "step", step)
            loop.call_soon_threadsafe(lambda: late.append(asyncio.create_task(engine.generate(request_of(4)))))
            raise RuntimeError("out of memory")

        monkeypatch.setattr(core, "step", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.generate(request_of(3))
        while not late:
            await asyncio.sleep(0)
        assert (await late[0]).token_ids == SCRIPTS[4].tokens

    asyncio.run(run())


def test_a_request_that_still_waits_for_a_slot_can_be_cancelled() -> None:
    async def run() -> None:
        engine = AsyncEngine(make_engine(num_slots=1))
        first, second = (asyncio.create_task(engine.generate(request_of(place))) for place in (5, 4))
        await asyncio.sleep(0)
        second.cancel()
        assert (await first).token_ids == SCRIPTS[5].tokens
        assert (await engine.generate(request_of(0))).token_ids == SCRIPTS[0].tokens
        assert engine.num_requests == 0

    asyncio.run(run())
