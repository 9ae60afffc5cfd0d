"""Ten thousand requests of all kinds through one engine: no wrong token, no leaked slot, and the statistics add up."""

from dataclasses import dataclass, field
from random import Random

import pytest
from naive_decoding import NaiveAnswer
from random_requests import NEAR_TIE, RandomChooser, make_engine, naive_answer
from tiny_models import MASK_ID

from workers.config import RowDecodingSettings
from workers.decoding.request import Request, Result

NUM_SLOTS, BLOCK_SIZE, MAX_LENGTH, CACHE_BLOCK = 24, 4, 72, 5
COMMON = tuple(2 + 7 * place % 37 for place in range(40))


@dataclass
class Kind:
    """A prompt and how tokens are chosen, and its answer in one-token and in tau mode. Many requests are of one kind."""

    prompt: tuple[int, ...]
    options: dict
    one_token: NaiveAnswer
    tau: NaiveAnswer | None


@dataclass
class Tally:
    """What was told and what came of it."""

    kinds: dict[int, tuple[Request, NaiveAnswer]] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    num_bad: int = 0
    num_cancelled: int = 0


def kinds_of(random: Random, count: int, cache_block: int | None) -> list[Kind]:
    kinds = []
    for place in range(count):
        prompt = tuple(random.randrange(MASK_ID) for _ in range(random.choice([1, 3, 8, 20])))
        if random.random() < 0.2:
            prompt = COMMON + prompt[:8]
        options = {
            "max_new_tokens": random.randint(1, 12),
            "temperature": random.choice([0.0, 0.0, 0.8, 1.3]),
            "top_k": random.choice([0, 6]),
            "seed": place,
            "repetition_penalty": random.choice([1.0, 1.0, 1.4]),
            "min_new_tokens": random.choice([0, 0, 4]),
            "stop": random.choice([(), (), ("\x05",)]),
        }
        sizes = {"block_size": BLOCK_SIZE, "max_length": MAX_LENGTH, "cache_block": cache_block}

        def answer(mode: str, prompt=prompt, options=options, sizes=sizes) -> NaiveAnswer:
            threshold = 0.3 if mode == "tau" else None
            request = Request(0, prompt, RowDecodingSettings(mode=mode, threshold=threshold, **options))
            return naive_answer("llama", request, **sizes)

        kinds.append(Kind(prompt, options, answer("one_token"), answer("tau") if place % 2 else None))
    return kinds


def request_of(kind: Kind, row_id: int, random: Random) -> tuple[Request, NaiveAnswer]:
    if kind.tau is not None and random.random() < 0.4:
        return Request(row_id, kind.prompt, RowDecodingSettings(threshold=0.3, **kind.options)), kind.tau
    extra = {"mode": "one_token"}
    if random.random() < 0.8:
        window, branches = random.choice([None, "auto", 2, 3, 4, 7]), random.choice([None, True, False])
        extra = {"mode": "verified", "window": window, "draft_branches": branches}
    return Request(row_id, kind.prompt, RowDecodingSettings(**extra, **kind.options)), kind.one_token


def bad_request(row_id: int, random: Random) -> Request:
    prompt = random.choice([(), (MASK_ID,), (3,) * MAX_LENGTH, (41,), (-1, 2)])
    return Request(row_id, prompt, RowDecodingSettings())


def run(engine, kinds: list[Kind], num_requests: int, random: Random) -> Tally:
    tally, num_submitted = Tally(), 0
    while num_submitted < num_requests or engine.has_work:
        for _ in range(random.choice([0, 2, 8, 30])):
            if num_submitted == num_requests:
                break
            if random.random() < 0.03:
                _, failed = engine.submit(bad_request(num_submitted, random))
                assert failed.error is not None
                tally.num_bad += 1
            else:
                request, answer = request_of(random.choice(kinds), num_submitted, random)
                ticket, failed = engine.submit(request)
                assert failed is None and ticket == num_submitted
                tally.kinds[ticket], tally.told[ticket] = (request, answer), []
            num_submitted += 1
        if random.random() < 0.1 and num_submitted:
            ticket = random.randrange(max(0, num_submitted - 60), num_submitted)
            is_running = ticket in tally.kinds and ticket not in tally.results
            assert engine.cancel(ticket) == is_running
            if is_running:
                tally.num_cancelled += 1
                del tally.kinds[ticket]
        if engine.has_work:
            for progress in engine.step():
                tally.told[progress.ticket] += progress.token_ids
                if progress.result is not None:
                    assert progress.ticket not in tally.results
                    tally.results[progress.ticket] = progress.result
    return tally


@pytest.mark.parametrize(("cache", "num_requests"), [("ragged", 10_000), ("block", 1_500)])
def test_many_requests(cache, num_requests):
    random = Random(7)
    engine = make_engine(
        "llama",
        cache=cache,
        num_slots=NUM_SLOTS,
        block_size=BLOCK_SIZE,
        max_length=MAX_LENGTH,
        cache_block=CACHE_BLOCK,
        prefill_chunk=48,
    )
    engine._windows._choosers["verified"] = RandomChooser(BLOCK_SIZE, random)
    kinds = kinds_of(random, 80, CACHE_BLOCK if cache == "block" else None)
    tally = run(engine, kinds, num_requests, random)
    assert set(tally.results) == set(tally.kinds)
    num_near_ties = 0
    for ticket, result in tally.results.items():
        request, answer = tally.kinds[ticket]
        assert tuple(tally.told[ticket]) == result.token_ids
        if list(result.token_ids) != answer.token_ids:
            assert answer.smallest_gap < NEAR_TIE
            num_near_ties += 1
            continue
        assert (result.id, result.text, result.finish_reason) == (ticket, answer.text, answer.finish_reason)
        if request.decoding.mode != "verified":
            assert result.num_forwards == answer.num_forwards or answer.smallest_gap < NEAR_TIE
    assert num_near_ties <= num_requests / 1000
    assert sorted(engine._scheduler._free_slots) == list(range(NUM_SLOTS))
    assert engine._scheduler.num_running == engine._scheduler.num_waiting == 0
    counts = engine.statistics
    assert (counts.num_rows, counts.num_errors) == (len(tally.results), tally.num_bad)
    assert counts.num_rows + counts.num_errors + tally.num_cancelled == num_requests
    assert min(tally.num_bad, tally.num_cancelled) > num_requests / 200
    assert counts.num_kept_tokens == sum(len(told) for told in tally.told.values())
    assert counts.num_kept_tokens == sum(kept * times for kept, times in counts.kept_per_forward.items())
    assert counts.num_row_forwards == sum(counts.kept_per_forward.values())
    assert counts.num_row_forwards >= sum(result.num_forwards for result in tally.results.values())
    assert 0.2 < counts.slot_occupancy <= 1
