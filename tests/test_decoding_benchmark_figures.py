"""What the decoding benchmark makes of its runs, and what it prints; no test here times anything."""

import json

import pytest
import torch
from tiny_models import MASK_ID, tiny_model

from benchmarks import decoding, decoding_costs, decoding_methods
from benchmarks.decoding_comparison import Comparison, batch_methods, fixed_windows, reference_of, window_methods
from benchmarks.decoding_figures import BatchRuns, Figures
from benchmarks.decoding_methods import Decoded, Engines
from benchmarks.decoding_models import NoText, Subject, prepare, trained_walker
from benchmarks.decoding_oracles import Differences
from benchmarks.decoding_work import EQUAL, RAGGED, Sizes
from workers.decoding.statistics import RunStatistics
from workers.models.loading import init_mask_embedding

CPU = torch.device("cpu")
SMALL = Sizes(prompt=5, output=11, num_ragged=6, ragged_prompts=(2, 9), ragged_outputs=(2, 7), max_new_tokens=40)
BY_BATCH = (
    "one_token_vs_generate",
    "ragged_cache_vs_block_cache",
    "auto_window_vs_one_token",
    "auto_window_vs_best_fixed",
    "window_cost",
    "tokens_per_forward",
)
NUMBERS = ("ragged_prompts_vs_generate", "continuous_vs_generate_batch", "engine_overhead_share")


def random_subject() -> Subject:
    model = prepare(tiny_model("llama_tied"), CPU, torch.float32)
    init_mask_embedding(model, MASK_ID)  # never the likeliest token, for `generate` would say it
    return Subject("tiny", model, NoText(), MASK_ID, frozenset(), 8, False)


@pytest.fixture(scope="module")
def walker() -> Subject:
    return trained_walker(60, CPU, torch.float32)


def comparison_of(kind: str, seconds: dict[str, list[float]]) -> Comparison:
    made = Comparison(random_subject(), 4, kind, {})
    counts = RunStatistics(model_seconds=3.0, engine_seconds=1.0, num_kept_tokens=10, num_row_forwards=5)
    made.results = {
        name: [Decoded([(1,) * 10], value, value, counts) for value in values] for name, values in seconds.items()
    }
    made.differences = {"one_token": Differences(5, 2, 1, 0.5)}
    return made


def test_figures_of_a_batch_size() -> None:
    equal = comparison_of(
        EQUAL,
        {
            "generate": [2.0, 3.0, 8.0],
            "one_token": [2.0, 2.0, 2.0],
            "one_token_block": [3.0, 3.0, 3.0],
            "verified_auto": [1.0, 2.0, 4.0],
            "verified_2": [2.0, 2.0, 2.0],
            "verified_4_branches": [1.0, 1.0, 9.0],  # the best in the median, though not on average
        },
    )
    ragged = comparison_of(RAGGED, {"generate": [4.0], "continuous_batching": [3.0], "one_token": [2.0]})
    costs = decoding_costs.StepCosts(4, {1: [1.0, 2.0], 2: [1.5, 2.0], 8: [3.0, 6.0]})
    figures = Figures({4: BatchRuns(equal, equal, costs)}, ragged)
    values = json.loads(json.dumps(figures.values()))
    assert {name: values[name] for name in (*BY_BATCH, *NUMBERS)} == {
        "one_token_vs_generate": {"4": 1.5},
        "ragged_cache_vs_block_cache": {"4": 1.5},
        "auto_window_vs_one_token": {"4": 1.0},
        "auto_window_vs_best_fixed": {"4": 1.0},
        "window_cost": {"4": {"2": 1.25, "8": 3.0}},
        "tokens_per_forward": {"4": 2.0},
        "ragged_prompts_vs_generate": 2.0,
        "continuous_vs_generate_batch": 1.5,
        "engine_overhead_share": 0.25,
    }
    assert values["one_token_vs_generate_spread"] == {"4": [1.0, 4.0]}
    assert values["window_cost_spread"] == {"4": {"2": [1.0, 1.5], "8": [3.0, 3.0]}}
    assert values["ragged_prompts_vs_generate_spread"] == [2.0, 2.0]
    assert values["best_fixed"] == {"4": "verified_4_branches"}
    assert values["rows_with_other_tokens"] == {"equal_4_one_token": [2, 5, 1], "ragged_4_one_token": [2, 5, 1]}
    assert figures.num_wrong == 2
    assert ["window_cost, 2", "4", 1.25, 1.0, 1.5] in figures.rows()
    assert equal.rows()[1][2:4] == ["one_token", 5.0]
    assert equal.rows()[1][-1] == "2 of 5 (1 at near-ties; widest gap 5.0e-01)"


def test_one_token_decoding_is_the_fixed_window_of_one() -> None:
    slow = comparison_of(EQUAL, {"one_token": [2.0], "verified_auto": [2.5], "verified_2": [3.0]})
    assert slow.best_fixed() == "one_token"


def test_methods_of_each_kind(walker: Subject) -> None:
    every = {
        "verified_2",
        "verified_2_branches",
        "verified_4",
        "verified_4_branches",
        "verified_8",
        "verified_8_branches",
    }
    assert set(fixed_windows(8)) == every
    assert set(fixed_windows(4)) == {name for name in every if "8" not in name}  # none beyond the block size
    trained, untrained = Engines(walker, 2, 64), Engines(random_subject(), 2, 64)
    assert set(batch_methods(trained)) == {"generate", "one_token", "one_token_block"}
    assert set(window_methods(trained, is_quick=False)) == {"one_token", "verified_auto", *every, "tau", "tau_block"}
    full = window_methods(untrained, is_quick=False)
    assert set(full) == {"one_token", "verified_auto", *every, "verified_auto_never_right"}
    quick = {"one_token", "verified_auto", "verified_2", "verified_2_branches", "verified_4", "verified_8"}
    assert set(window_methods(untrained, is_quick=True)) == quick
    assert reference_of("one_token") == "generate"
    assert reference_of("verified_8_branches") == "one_token"
    assert reference_of("tau") is None


def test_cost_of_a_step_counts_the_query_tokens_of_its_window() -> None:
    costs = decoding_costs.measure_step_costs(random_subject(), 3, 1, 5, told=lambda text: None)
    assert costs.query_tokens == {1: [3.0], 2: [6.0], 4: [12.0], 8: [24.0]}
    assert costs.ratios()[1] == [1.0]
    assert len(costs.rows()) == 4


@pytest.mark.parametrize("is_trained", [False, True])
def test_benchmark_prints_its_figures_last(
    is_trained: bool, walker: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = walker if is_trained else random_subject()
    monkeypatch.setattr(decoding, "subjects", lambda options, device, dtype: [subject])
    monkeypatch.setattr(decoding, "FULL", SMALL)
    monkeypatch.setattr(decoding, "RAGGED_SLOTS", 3)
    assert decoding.main(["--silent", "--batches", "1", "2", "--repeats", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert ("drafts are replaced" in captured.out) == (not is_trained)
    values = json.loads(captured.out.splitlines()[-1])
    assert all(set(values[name]) == {"1", "2"} for name in BY_BATCH)
    assert all(set(each) == {"2", "4", "8"} for each in values["window_cost"].values())
    assert all(isinstance(values[name], float) for name in NUMBERS)
    assert 0 < values["engine_overhead_share"] < 1
    assert ("auto_window_vs_one_token_never_right" in values) == (not is_trained)
    assert values["rows_with_other_tokens"]["ragged_3_one_token"] == [0, 6, 0]
    assert {counts[0] for counts in values["rows_with_other_tokens"].values()} == {0}


def test_a_wrong_token_makes_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A static batch that says something else, at no tie."""
    right = decoding_methods._generate_batch
    monkeypatch.setattr(
        decoding_methods, "_generate_batch", lambda *work: [(2, *answer[1:]) for answer in right(*work)]
    )
    monkeypatch.setattr(decoding, "subjects", lambda options, device, dtype: [random_subject()])
    monkeypatch.setattr(decoding, "FULL", SMALL)
    monkeypatch.setattr(decoding, "RAGGED_SLOTS", 3)
    assert decoding.main(["--silent", "--batches", "2", "--repeats", "1"]) == 1
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["rows_with_other_tokens"]["equal_2_one_token"][0] > 0
