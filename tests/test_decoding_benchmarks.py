"""The decoding benchmarks compare the same work, notice wrong tokens, and print what they promise; no test here times anything."""

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import MASK_ID, tiny_model

from benchmarks import decoding_work
from benchmarks.decoding_comparison import Comparison
from benchmarks.decoding_drafts import Agreement
from benchmarks.decoding_methods import (
    Decoded,
    Engines,
    Pace,
    best_order,
    continuous_batching_method,
    generate_method,
    until_end,
)
from benchmarks.decoding_models import NoText, Subject, prepare, trained_walker, walk
from benchmarks.decoding_oracles import Differences, argmax_loop, compare
from benchmarks.decoding_report import table
from benchmarks.decoding_work import FULL, QUICK, RAGGED, Sizes, Work, equal_work, natural_work, ragged_work
from workers.decoding.statistics import RunStatistics
from workers.models.loading import init_mask_embedding

CPU = torch.device("cpu")
SMALL = Sizes(prompt=5, output=11, num_ragged=6, ragged_prompts=(2, 9), ragged_outputs=(2, 7), max_new_tokens=40)


def random_subject(**facts_of_subject) -> Subject:
    model = prepare(tiny_model("llama_tied"), CPU, torch.float32)
    init_mask_embedding(model, MASK_ID)  # never the likeliest token, for `generate` would say it
    values = {"end_ids": frozenset(), "is_trained": False, **facts_of_subject}
    return Subject("tiny", model, NoText(), MASK_ID, block_size=8, **values)


@pytest.fixture(scope="module")
def walker() -> Subject:
    return trained_walker(60, CPU, torch.float32)


def small_work(end_ids: frozenset[int] = frozenset()) -> Work:
    prompts = ((3, 4, 5), (7, 8, 9, 10, 11), (12, 13), (20, 21, 22, 23), (30, 31, 32))
    return Work(prompts, (9, 4, 12, 1, 7), end_ids)


def test_walks_follow_their_rule() -> None:
    """Places in order; behind each eighth a choice, of which 51 skips four places."""
    tokens = walk(np.random.default_rng(0), 3000)
    assert len(tokens) == 3000
    choices = Counter()
    for before, choice, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if choice >= 50:
            assert before % 8 == 7
            choices[choice] += 1
            assert after == 8 + (before - 8 + 1 + 4 * (choice - 50)) % 32
        elif before < 50:
            assert choice == before + 1
            assert before % 8 != 7
    assert min(choices[50], choices[51]) > 100
    assert set(choices) == {50, 51}


def test_lengths_of_work() -> None:
    subject = random_subject()
    equal = equal_work(subject, 6, SMALL)
    assert {len(prompt) for prompt in equal.prompts} == {5}
    assert equal.budgets == (11,) * 6
    assert equal.max_length == 16
    ragged = ragged_work(subject, 64, 0, FULL)
    lengths = [len(prompt) for prompt in ragged.prompts]
    assert 8 <= min(lengths) < 30 < 220 < max(lengths) <= 256
    assert 8 <= min(ragged.budgets) < 20 < 110 < max(ragged.budgets) <= 128
    assert max(token for prompt in ragged.prompts for token in prompt) < MASK_ID
    assert ragged == ragged_work(subject, 64, 0, FULL)
    assert ragged.prompts != ragged_work(subject, 64, 1, FULL).prompts
    assert (QUICK.num_ragged, QUICK.ragged_prompts, QUICK.ragged_outputs) == (16, (8, 64), (8, 32))
    start = ragged.start(3, 20)
    assert start.prompts == ragged.prompts[:3]
    assert start.budgets == tuple(min(budget, 20) for budget in ragged.budgets[:3])


def test_work_from_a_file_has_its_prompts_and_the_models_ends() -> None:
    prompts = tuple(tuple(range(2, 4 + row)) for row in range(5))
    subject = random_subject(prompts=prompts, end_ids=frozenset({1}))
    natural = natural_work(subject, 3, 1, SMALL)
    assert natural.prompts == (prompts[3], prompts[4], prompts[0])
    assert natural.budgets == (40, 40, 40)
    assert natural.end_ids == {1}
    forced = ragged_work(subject, 3, 1, SMALL)
    assert (forced.prompts, forced.end_ids) == (natural.prompts, frozenset())
    assert max(forced.budgets) <= 7
    equal = equal_work(subject, 3, SMALL)
    assert equal.prompts == ((2, 3), (3, 4), (4, 5))
    assert equal.end_ids == frozenset()


def test_prompts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last answer of a conversation is no part of the prompt; `max_prompts` rows are read."""
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text("".join(json.dumps({"messages": turns, "text": f"t{row}"}) + "\n" for row in range(4)))
    asked = []
    monkeypatch.setattr(decoding_work, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(decoding_work, "inspect_model_folder", lambda folder: argparse.Namespace(end_ids=frozenset()))
    monkeypatch.setattr(decoding_work, "read_multi_token_settings", lambda folder: None)
    monkeypatch.setattr(decoding_work, "encode_prompt", lambda _t, prompt, **_k: asked.append(prompt) or [len(asked)])
    assert decoding_work.read_prompts(str(file), "messages", "folder", 3) == [(1,), (2,), (3,)]
    assert asked == [turns[:1]] * 3
    decoding_work.read_prompts(str(file), "text", "folder", 1)
    assert asked[-1] == "t0"


def test_answers_end_with_the_first_end_token_within_the_budget() -> None:
    assert until_end([5, 6, 7, 8], 3, frozenset()) == (5, 6, 7)
    assert until_end([5, 6, 7, 8], 3, frozenset({6, 7})) == (5, 6)
    assert until_end([5, 6, 7, 8], 3, frozenset({8})) == (5, 6, 7)
    assert until_end([5], 3, frozenset({5})) == (5,)


@pytest.mark.parametrize("has_ends", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_method_gives_the_tokens_of_the_plain_loop(has_ends: bool, batch_size: int) -> None:
    """Otherwise their seconds would be seconds of different work."""
    subject, work = random_subject(), small_work()
    if has_ends:
        answers = argmax_loop(subject, work)
        ends = frozenset({answers[0][4], answers[2][6]})
        work = small_work(ends)
        assert argmax_loop(subject, work) != answers
    expected = argmax_loop(subject, work)
    engines = Engines(subject, batch_size, work.max_length)
    methods = {
        "generate": generate_method(subject, batch_size),
        "continuous": continuous_batching_method(subject, batch_size, work.max_length),
        "one token": engines.method("ragged", mode="one_token"),
        "block": engines.method("block", mode="one_token"),
        "verified": engines.method("ragged", mode="verified", window=4, draft_branches=True),
    }
    for name, method in methods.items():
        for _ in range(2):  # a method can be used again
            assert method(work).answers == expected, name
    assert subject.model.config._attn_implementation == "sdpa"  # as continuous batching found it


def test_differences_tell_near_ties_from_faults() -> None:
    subject, work = random_subject(), small_work()
    right = argmax_loop(subject, work)
    assert compare(subject, work, right, right) == Differences(5, 0, 0, 0.0)
    wrong = list(right)
    wrong[0] = (*right[0][:3], (right[0][3] + 1) % MASK_ID, *right[0][4:])
    found = compare(subject, work, right, wrong)
    assert (found.num_differing, found.num_near_ties, found.num_wrong) == (1, 0, 1)
    assert found.largest_gap > 1e-3
    wrong[1] = right[1][:-1]  # an answer that stops too early is no tie
    assert compare(subject, work, right, wrong).num_wrong == 2
    assert compare(subject, work, right, wrong).largest_gap == float("inf")
    subject.model.get_output_embeddings().weight.zero_()
    tied = compare(subject, work, right, [*wrong[:1], *right[1:]])
    assert (tied.num_differing, tied.num_near_ties, tied.num_wrong) == (1, 1, 0)


def test_static_batches_are_sorted_as_takes_least() -> None:
    """By budget when steps are dear, by prompt when prompts are, and answers come back in the order of the rows."""
    work = Work(((1,), (1, 2, 3), (1, 2), (1, 2, 3, 4)), (9, 2, 3, 8), frozenset())
    assert best_order(work, 2, Pace(prompt_token=0.0, step=1.0)) == [1, 2, 3, 0]
    assert best_order(work, 2, Pace(prompt_token=1.0, step=0.0)) == [0, 2, 1, 3]


def test_replaced_drafts_agree_as_often_as_said() -> None:
    answers = [tuple(range(1000)), tuple(range(500))]
    for probability in (0.0, 0.7, 1.0):
        drafts = Agreement.drawn(answers, probability, 3, mask_token_id=1).drafts
        assert [len(row) for row in drafts] == [1000, 500]
        pairs = [pair for row, answer in zip(drafts, answers, strict=True) for pair in zip(row, answer, strict=True)]
        assert sum(draft == token for draft, token in pairs) / 1500 == pytest.approx(probability, abs=0.04)
        assert all(draft != 1 for draft, token in pairs if draft != token)  # never the placeholder
    drawn = [Agreement.drawn(answers, 0.7, seed, 1) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert Agreement.drawn([answers[0][:20], answers[1]], 0.7, 3, 1).drafts[0] == drawn[0].drafts[0][:20]


def test_windows_of_an_untrained_model_keep_drafts_and_its_tokens() -> None:
    """All drafts right: W tokens a step. None right: one. Either way the tokens are those of one-token decoding."""
    work = equal_work(random_subject(), 3, SMALL)
    engines = Engines(random_subject(), 3, work.max_length)
    expected = engines.method("ragged", mode="one_token")(work).answers
    for window in (2, 4):
        per_forward = {}
        for agreement in (0.0, 0.5, 1.0):
            settings = {"mode": "verified", "window": window, "draft_branches": window == 4}
            decoded = engines.method("ragged", agreement=agreement, **settings)(work)
            assert decoded.answers == expected
            per_forward[agreement] = decoded.statistics.tokens_per_forward
        assert per_forward[0.0] == 1.0
        assert per_forward[0.0] < per_forward[0.5] < per_forward[1.0]
        assert per_forward[1.0] == 11 / {2: 6, 4: 4}[window]  # the first step has no drafts yet


def test_methods_take_turns_on_the_same_work() -> None:
    subject = random_subject()
    seen: list[tuple[str, Work]] = []
    seconds = {"generate": 6.0, "one_token": 3.0, "verified_auto": 1.5}

    def method(name: str):
        def run(work: Work) -> Decoded:
            seen.append((name, work))
            answers = [tuple(range(budget)) for budget in work.budgets]
            return Decoded(answers, seconds[name], 9.0, RunStatistics(model_seconds=3.0, engine_seconds=1.0))

        return run

    comparison = Comparison(subject, 5, RAGGED, {name: method(name) for name in seconds})
    comparison.run(small_work(), 3, told=lambda text: None)
    warm_up, timed = seen[:-9], seen[-9:]
    # One-token decoding goes through all; the automatic window sees 5, 2 and 1 rows.
    assert [(name, len(work.prompts)) for name, work in warm_up] == [
        ("one_token", 5),
        ("generate", 4),
        ("verified_auto", 5),
        ("verified_auto", 2),
        ("verified_auto", 1),
    ]
    assert warm_up[0][1] == small_work()
    for repeat in range(3):
        of_repeat = timed[3 * repeat : 3 * repeat + 3]
        assert sorted(name for name, _ in of_repeat) == sorted(seconds)
        assert {(work.prompts, work.budgets, work.seed) for _, work in of_repeat} == {
            (small_work().prompts, small_work().budgets, repeat)
        }
    assert {timed[0][0], timed[3][0], timed[6][0]} == set(seconds)
    assert comparison.speedups("one_token", "generate") == [2.0, 2.0, 2.0]
    assert comparison.overhead_shares("one_token") == [0.25, 0.25, 0.25]
    assert comparison.differences == {"one_token": Differences(15), "verified_auto": Differences(15)}


def test_tables() -> None:
    assert table(("a", "name"), [[1, "x"], [2.5, None]]) == "    a  name\n-----  ----\n    1  x\n2.500  -\n"
