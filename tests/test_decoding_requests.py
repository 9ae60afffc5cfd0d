"""Requests of several callers in one engine, and a threshold that changes while a request runs."""

import pytest
from scripted_model import END_ID, MASK_ID, ByteTokenizer, Script, ScriptedModel

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request

SCRIPT = Script((9, 8), tuple(range(20, 40)) + (END_ID,), (0.9,) * 21)


def make_engine() -> DecodingEngine:
    return DecodingEngine(
        ScriptedModel(SCRIPT, last_position=63),
        ByteTokenizer(),
        mask_token_id=MASK_ID,
        end_ids={END_ID},
        block_size=4,
        num_slots=2,
        max_length=64,
    )


def request_of(name: str, **settings: object) -> Request:
    return Request(name, SCRIPT.prompt, RowDecodingSettings(**settings))


def test_a_generator_that_is_closed_late_takes_away_its_own_rows_only() -> None:
    engine = make_engine()
    first = engine.generate([request_of("a")])
    next(first)
    second = engine.generate([request_of("b", max_new_tokens=2 + place) for place in range(4)])
    results = [next(second)]
    first.close()
    results += second
    assert len(results) == 4


def test_a_run_beside_another_is_refused_and_costs_it_nothing() -> None:
    engine = make_engine()
    first = engine.generate([request_of("a", max_new_tokens=1), request_of("b")])
    results = [next(first)]
    with pytest.raises(RuntimeError, match="unfinished requests; use submit and step"):
        engine.generate_all([request_of("c")])
    results += first
    assert [result.id for result in results] == ["a", "b"]
    assert results[1].token_ids == SCRIPT.tokens


def test_the_threshold_of_a_running_request_can_be_changed() -> None:
    engine = make_engine()
    ticket, _ = engine.submit(request_of("a", threshold=0.95))
    other, _ = engine.submit(request_of("b", mode="one_token"))
    counts = [len(each.token_ids) for _ in range(3) for each in engine.step() if each.ticket == ticket]
    assert counts == [1, 1, 1]
    assert engine.set_threshold(ticket, 0.8)
    counts = [len(each.token_ids) for _ in range(3) for each in engine.step() if each.ticket == ticket]
    assert counts == [4, 4, 4]
    # 1.0 keeps no draft, so none is made; and back again.
    assert engine.set_threshold(ticket, 1.0)
    assert [len(each.token_ids) for each in engine.step() if each.ticket == ticket] == [1]
    assert engine.set_threshold(ticket, 0.5)
    assert [len(each.token_ids) for each in engine.step() if each.ticket == ticket] == [4]
    assert not engine.set_threshold(other, 0.5)
    assert not engine.set_threshold(99, 0.5)
    with pytest.raises(ValueError, match="threshold"):
        engine.set_threshold(ticket, -1.0)
