"""Weights of the entries of `data.train`: exact counts over epochs, the same on every rank, on resume as in one go."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_plans import epoch_order, epoch_uses, index_of, plan_of

from pipelines import storage
from pipelines.mixture import Share, describe_sources
from pipelines.run_folder import RunFolder
from pipelines.sample_order import StreamPlan, epoch_windows
from pipelines.sample_stream import rank_steps
from pipelines.sft_rows import PART_SCHEMA
from pipelines.sft_source import Source, list_sources
from pipelines.training_inputs import TrainingInputs
from workers.config import DataSettings, TrainSftRecipe
from workers.errors import InputError

WEIGHTS = st.one_of(
    st.sampled_from([1.0, 0.5, 0.25, 2.0, 0.1, 1.5]), st.floats(0.01, 5).map(lambda weight: round(weight, 3))
)
# Entries: a weight and the rows of the entry's parts.
ENTRIES = st.lists(st.tuples(WEIGHTS, st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=4)


def mixed_plan(entries: list[tuple[float, list[int]]], **options: int | None) -> StreamPlan:
    """One shard with one part for each number of rows."""
    sources, rows = [], []
    for number, (weight, parts) in enumerate(entries):
        files = tuple(str(len(rows) + i) for i in range(len(parts)))
        sources.append(Source(f"entry {number}", Fraction(str(weight)), files))
        rows += parts
    return plan_of(index_of(rows, sources=tuple(sources)), **{"max_steps": 100, **options})


def uses_of(plan: StreamPlan, num_epochs: int) -> list[Counter[tuple[int, int]]]:
    """How often each (part, row) is used, epoch by epoch."""
    return [Counter(epoch_order(plan, epoch)) for epoch in range(num_epochs)]


@given(ENTRIES, st.integers(0, 2**40))
def test_counts_are_exact_after_any_number_of_epochs(entries: list[tuple[float, list[int]]], seed: int) -> None:
    plan = mixed_plan(entries, seed=seed)
    weights = [Fraction(str(weight)) for weight, parts in entries for _ in parts]
    total: Counter[tuple[int, int]] = Counter()
    for epoch, uses in enumerate(uses_of(plan, 6)):
        total += uses
        for part, weight in enumerate(weights):
            num_rows = plan.index.parts[part].num_rows
            counts = [total[part, row] for row in range(num_rows)]
            assert max(counts) - min(counts) <= 1
            assert abs(sum(counts) - num_rows * (epoch + 1) * weight) < 1
            in_epoch = [uses[part, row] for row in range(num_rows)]
            assert math.floor(weight) <= min(in_epoch)
            assert max(in_epoch) <= math.ceil(weight)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7), st.integers(1, 9))
def test_a_rational_weight_is_exact_over_its_denominator(rows: list[int], uses: int, epochs: int) -> None:
    """Weight 1/2: each row exactly once in two epochs; 5/2: exactly five times."""
    source = Source("entry", Fraction(uses, epochs), tuple(map(str, range(len(rows)))))
    plan = plan_of(index_of(rows, sources=(source,)), max_steps=100)
    total = sum(uses_of(plan, epochs), Counter())
    assert total == {(part, row): uses for part, n in enumerate(rows) for row in range(n)}


@given(st.integers(1, 9), st.integers(1, 30), WEIGHTS, st.integers(0, 2**40))
def test_an_entry_of_small_shards_is_spread_over_the_epochs(rows: int, shards: int, weight: float, seed: int) -> None:
    """Shards of one row at weight 0.1 would all wait for the tenth epoch if each rounded by itself."""
    plan = mixed_plan([(weight, [rows] * shards)], seed=seed)
    exact = Fraction(str(weight))
    for epoch, uses in enumerate(uses_of(plan, 4)):
        so_far = math.floor(rows * shards * exact * epoch)
        assert uses.total() == math.floor(rows * shards * exact * (epoch + 1)) - so_far


@given(ENTRIES, st.integers(1, 40), st.integers(0, 2**40))
def test_weight_one_changes_nothing(entries: list[tuple[float, list[int]]], window: int, seed: int) -> None:
    weighted = mixed_plan([(1.0, rows) for _, rows in entries], seed=seed, shuffle_window=window)
    plain = replace(weighted, index=replace(weighted.index, sources=()))
    for epoch in range(3):
        assert epoch_uses(weighted, epoch) == epoch_uses(plain, epoch)
        assert {uses for uses, _, _ in epoch_uses(plain, epoch)} == {epoch}


@given(ENTRIES)
def test_every_use_of_a_row_has_its_own_number(entries: list[tuple[float, list[int]]]) -> None:
    """The number names the block phase: two uses with one number would be the same training sample twice."""
    plan = mixed_plan(entries)
    uses = sorted(use for epoch in range(5) for use in epoch_uses(plan, epoch))
    assert len(set(uses)) == len(uses)
    counts = Counter((part, row) for _, part, row in uses)
    assert uses == sorted((n, *row) for row, count in counts.items() for n in range(count))


@given(ENTRIES, st.integers(1, 6), st.integers(1, 3))
def test_steps_follow_the_size_of_each_epoch(
    entries: list[tuple[float, list[int]]], samples_per_step: int, num_epochs: int
) -> None:
    capped = mixed_plan(entries, samples_per_step=samples_per_step)
    sizes = [len(epoch_order(capped, epoch)) for epoch in range(num_epochs)]
    steps = [-(-size // samples_per_step) for size in sizes]
    if not sum(steps):
        with pytest.raises(InputError, match=r"data\.weights: found weights that use none"):
            replace(capped, max_steps=None, num_epochs=num_epochs)
        return
    plan = replace(capped, max_steps=None, num_epochs=num_epochs)
    spans = list(plan.epoch_spans())
    assert [span.num_samples for span in spans] == sizes
    assert [span.end_step - span.first_step for span in spans] == steps
    assert plan.num_steps == sum(steps) == spans[-1].end_step
    assert plan.epochs == num_epochs


def test_a_heavy_weight_makes_no_heavy_window() -> None:
    """A part that is used a hundred times an epoch is read in pieces, each with a row at most once."""
    windows = epoch_windows(mixed_plan([(100.0, [10])], shuffle_window=30), 0)
    assert [window.end - window.start for window in windows] == [30] * 33 + [10]


def test_other_seeds_use_other_rows_first() -> None:
    first = {tuple(sorted(epoch_order(mixed_plan([(0.5, [8])], seed=seed), 0))) for seed in range(8)}
    assert len(first) > 4


@given(st.integers(1, 100), st.integers(0, 50), st.fractions(0.01, 9), st.fractions(0, 0.99))
def test_the_closed_form_is_the_sum_over_rows(rows: int, epoch: int, weight: Fraction, phase: Fraction) -> None:
    """Hermite's identity: rows with ranks (k + phase) / rows, each used floor(epoch * weight + rank) times."""
    each = [math.floor(epoch * weight + (k + phase) / rows) for k in range(rows)]
    assert Share(weight, phase).num_uses_before(epoch, rows) == sum(each)


def test_streams_of_a_mixture_resume_as_a_suffix(tmp_path: Path, ray_session: None) -> None:
    plan = mixed_plan([(1.0, [9, 4]), (0.3, [12]), (2.5, [5])], max_steps=None, num_epochs=3, shuffle_window=12)
    parts = []
    for part in plan.index.parts:
        rows = [
            {"file": part.file, "row": row, "token_ids": [row], "starts": [0], "ends": [1]}
            for row in range(part.num_rows)
        ]
        parts.append(replace(part, path=str(tmp_path / f"{part.file}.parquet")))
        pq.write_table(pa.Table.from_pylist(rows, schema=PART_SCHEMA), parts[-1].path)
    plan = replace(plan, index=replace(plan.index, parts=tuple(parts)))

    def names(rank: int, world_size: int, start: int) -> list[list[tuple[int, int, int]]]:
        steps = rank_steps(plan, rank, world_size, start)
        return [[(sample.epoch, sample.file, sample.row) for sample in step] for step in steps]

    whole = names(0, 1, 0)
    naive = [epoch_uses(plan, epoch) for epoch in range(3)]
    assert len({len(uses) for uses in naive}) > 1, "epochs of different sizes"
    assert whole == [uses[start : start + 8] for uses in naive for start in range(0, len(uses), 8)]
    second_epoch = -(-len(naive[0]) // 8)
    for start in (1, second_epoch, second_epoch + 1, plan.num_steps):
        assert names(0, 1, start) == whole[start:]
    halves = [names(rank, 2, 2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == [sorted(step) for step in whole[2:]]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name in ("a/1", "a/2", "b/1"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"prompt": "a", "response": "b"}\n')
    return tmp_path


def test_sources_are_the_entries_with_their_shards(shards: Path) -> None:
    paths = (str(shards / "b"), str(shards / "a"))
    sources = list_sources(paths, (0.1, 2.0))
    assert [(source.path, source.weight) for source in sources] == [
        (paths[0], Fraction(1, 10)),
        (paths[1], Fraction(2)),
    ]
    assert [[Path(file).name for file in source.files] for source in sources] == [["1.jsonl"], ["1.jsonl", "2.jsonl"]]


def test_a_shard_behind_two_entries_has_no_weight(shards: Path) -> None:
    paths = (str(shards / "a"), str(shards / "**" / "1.jsonl"))
    with pytest.raises(InputError, match=r"data\.weights: found .*a/1\.jsonl, which both .* reach") as caught:
        list_sources(paths, (1.0, 2.0))
    assert all(path in str(caught.value) for path in paths)
    assert [len(source.files) for source in list_sources(paths, ())] == [2, 1]
    data = DataSettings(train=paths, weights=(1.0, 2.0))
    run = RunFolder(str(shards / "run"), TrainSftRecipe(data=data))
    with pytest.raises(InputError, match=r"data\.weights"):
        TrainingInputs(TrainSftRecipe().model, data, 0, run).check()


def test_description_counts_rows_and_samples_of_each_entry() -> None:
    index = mixed_plan([(1.0, [9, 4]), (0.25, [10])]).index
    assert describe_sources(index) == [
        {"path": "entry 0", "weight": 1.0, "rows": 13, "samples_per_epoch": 13.0},
        {"path": "entry 1", "weight": 0.25, "rows": 10, "samples_per_epoch": 2.5},
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": (2.0, 1.0)}, "data.weights"),
        ({"weights": ()}, "data.weights"),
        ({"train": ("b", "a")}, "data.train"),
    ],
)
def test_a_run_goes_on_with_its_own_mixture_only(tmp_path: Path, change: dict[str, tuple], field: str) -> None:
    """Entries and weights in another order are another mixture, once there is a checkpoint."""
    data = DataSettings(train=("a", "b"), weights=(1.0, 2.0))
    folder = str(tmp_path / "run")
    RunFolder(folder, TrainSftRecipe(data=data)).take(overwrite=False)
    storage.publish_bytes(f"{folder}/sft/checkpoints/step-00000002/part", b"")
    RunFolder(folder, TrainSftRecipe(data=data)).check(overwrite=False)
    other = TrainSftRecipe(data=data.model_copy(update=change))
    with pytest.raises(InputError, match=field.replace(".", r"\.")):
        RunFolder(folder, other).check(overwrite=False)
