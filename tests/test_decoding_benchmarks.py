"""The decoding benchmarks compare the same work, notice wrong tokens, and print what they promise; no test here times anything."""

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import MASK_ID, tiny_model

from benchmarks import decoding, decoding_costs, decoding_work
from benchmarks.decoding_comparison import Comparison, figures, fixed_windows, make_methods, method_names, reference_of
from benchmarks.decoding_methods import (
    Decoded,
    Engines,
    continuous_batching_method,
    generate_method,
    until_end,
)
from benchmarks.decoding_models import NoText, Subject, prepare, trained_walker, walk
from benchmarks.decoding_oracles import Differences, argmax_loop, compare
from benchmarks.decoding_report import facts, table
from benchmarks.decoding_work import EQUAL, RAGGED, Lengths, Work, equal_work, ragged_work
from workers.decoding.statistics import RunStatistics

CPU = torch.device("cpu")


def random_subject(**facts_of_subject) -> Subject:
    model = prepare(tiny_model("llama_tied"), CPU, torch.float32)
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
    equal = equal_work(subject, 6, 0, Lengths(0.1, 99))
    assert {len(prompt) for prompt in equal.prompts} == {9}  # a tenth of 86 and of 114
    assert equal.budgets == (11,) * 6
    assert equal.max_length == 20
    ragged = ragged_work(subject, 30, 0, Lengths(0.5, 99))
    assert len({len(prompt) for prompt in ragged.prompts}) > 10
    assert len(set(ragged.budgets)) > 10
    assert max(token for prompt in ragged.prompts for token in prompt) < MASK_ID
    assert ragged == ragged_work(subject, 30, 0, Lengths(0.5, 99))
    assert ragged.prompts != ragged_work(subject, 30, 1, Lengths(0.5, 99)).prompts


def test_work_from_a_file_has_its_prompts_and_the_models_ends() -> None:
    prompts = tuple(tuple(range(2, 4 + row)) for row in range(5))
    subject = random_subject(prompts=prompts, end_ids=frozenset({1}))
    ragged = ragged_work(subject, 3, 1, Lengths(1.0, 40))
    assert ragged.prompts == (prompts[3], prompts[4], prompts[0])
    assert ragged.budgets == (40, 40, 40)
    assert ragged.end_ids == {1}
    equal = equal_work(subject, 3, 1, Lengths(1.0, 40))
    assert equal.prompts == ((5, 6), (6, 7), (2, 3))
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

    comparison = Comparison(subject, 2, RAGGED, {name: method(name) for name in seconds})
    works = [Work(small_work().prompts, (budget,) * 5, frozenset()) for budget in (3, 4, 5)]
    comparison.run(works, told=lambda text: None)
    assert [len(work.prompts) for _, work in seen[:3]] == [2, 2, 2]  # to warm up
    for repeat in range(3):
        of_repeat = seen[3 + 3 * repeat : 6 + 3 * repeat]
        assert sorted(name for name, _ in of_repeat) == sorted(seconds)
        assert {id(work) for _, work in of_repeat} == {id(works[repeat])}
    assert {seen[3][0], seen[6][0], seen[9][0]} == set(seconds)
    assert comparison.speedups("one_token", "generate") == [2.0, 2.0, 2.0]
    assert comparison.overhead_shares("one_token") == [0.25, 0.25, 0.25]
    assert comparison.differences == {"one_token": Differences(15), "verified_auto": Differences(15)}


def test_figures_of_a_batch_size() -> None:
    def comparison(kind: str, seconds: dict[str, list[float]]) -> Comparison:
        made = Comparison(random_subject(), 4, kind, {})
        counts = RunStatistics(model_seconds=3.0, engine_seconds=1.0, num_kept_tokens=10, num_row_forwards=5)
        made.results = {
            name: [Decoded([(1,) * 10], value, value, counts) for value in values] for name, values in seconds.items()
        }
        made.differences = {"one_token": Differences(5, 2, 1, 0.5)}
        return made

    equal = comparison(EQUAL, {"generate": [2.0, 3.0, 8.0], "one_token": [2.0, 2.0, 2.0]})
    ragged = comparison(
        RAGGED,
        {
            "generate": [4.0] * 3,
            "one_token": [2.0] * 3,
            "one_token_block": [3.0] * 3,
            "verified_auto": [1.0, 2.0, 4.0],
            "verified_2": [2.0, 2.0, 2.0],
            "verified_4_branches": [1.0, 1.0, 9.0],  # the best in the median, though not on average
        },
    )
    values = json.loads(json.dumps(figures(equal, ragged)))
    assert values == {
        "one_token_vs_generate_equal": [1.5, 1.0, 4.0],
        "one_token_vs_generate_ragged": [2.0, 2.0, 2.0],
        "ragged_vs_block": [1.5, 1.5, 1.5],
        "auto_vs_one_token": [1.0, 0.5, 2.0],
        "auto_vs_best_fixed": [1.0, 0.5, 2.25],
        "best_fixed_vs_one_token": [2.0, 0.222, 2.0],
        "best_fixed": "verified_4_branches",
        "engine_overhead_share": [0.25, 0.25, 0.25],
        "rows_with_other_tokens": {"one_token_equal": [2, 5, 1], "one_token_ragged": [2, 5, 1]},
    }
    assert ragged.rows()[1][2:4] == ["one_token", 5.0]
    assert ragged.rows()[1][-1] == "2 of 5 (1 at near-ties; widest gap 5.0e-01)"


def test_methods_of_each_kind(walker: Subject) -> None:
    everything = make_methods(walker, 2, 64, RAGGED)
    assert tuple(everything) == method_names()
    assert set(fixed_windows(4)) == {
        f"verified_{name}" for name in ("1", "2", "2_branches", "4", "4_branches")
    }  # none beyond the block size
    few = {"generate", "continuous_batching", "one_token", "one_token_block"}
    assert set(make_methods(walker, 2, 64, EQUAL)) == few
    assert set(make_methods(random_subject(), 2, 64, RAGGED)) == few
    assert reference_of("one_token") == "generate"
    assert reference_of("verified_8_branches") == "one_token"
    assert reference_of("tau") is None


def test_cost_of_a_step_counts_the_query_tokens_of_its_window() -> None:
    costs = decoding_costs.measure_step_costs(random_subject(), 3, 1, told=lambda text: None)
    tokens = {name: values[0] for name, values in costs.query_tokens.items()}
    assert tokens["one_token"] == tokens["verified_1"] == 3
    for window in (2, 4, 8):
        assert tokens[f"verified_{window}_branches"] == 3 * window**2
        assert 3 * window <= tokens[f"verified_{window}"] <= 3 * (2 * window - 1)
    assert costs.ratios()["one_token"] == [1.0]
    assert len(costs.rows()) == 8


def test_benchmark_prints_its_figures_last(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with random weights gets no ratios of windows, but their costs."""
    monkeypatch.setattr(decoding, "subjects", lambda options, device, dtype: [random_subject()])
    decoding.main(["--silent", "--batches", "2", "--repeats", "1", "--length-scale", "0.05"])
    captured = capsys.readouterr()
    assert captured.err == ""
    values = json.loads(captured.out.splitlines()[-1])
    batch = values["tiny"]["batch_2"]
    assert {"one_token_vs_generate_equal", "one_token_vs_generate_ragged", "ragged_vs_block"} < set(batch)
    assert "auto_vs_one_token" not in batch
    assert set(batch["step_cost"]) == {"one_token", *fixed_windows(8)}
    assert 0 < batch["engine_overhead_share"][0] < 1
    assert batch["rows_with_other_tokens"]["one_token_ragged"] == [0, 4, 0]


def test_tables() -> None:
    assert table(("a", "name"), [[1, "x"], [2.5, None]]) == "    a  name\n-----  ----\n    1  x\n2.500  -\n"
    assert facts({"one": (1.0, 2.0), "group": {"x": "y"}}) == "one    1.000  2.000\ngroup\n  x  y\n"
