"""The order of samples is a function of (seed, epoch, listing): pinned, seeded, in windows, cut into steps."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_plans import epoch_order, index_of, plan_of

from pipelines.sample_order import epoch_windows

PART_ROWS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(PART_ROWS, st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5))
def test_each_epoch_is_a_permutation_of_all_rows(part_rows: list[int], window: int, seed: int, epoch: int) -> None:
    plan = plan_of(index_of(part_rows), shuffle_window=window, seed=seed)
    windows = epoch_windows(plan, epoch)
    assert sorted(piece.part for w in windows for piece in w.pieces) == list(range(len(part_rows)))
    assert [w.start for w in windows] == [0, *(w.end for w in windows[:-1])]
    assert all(len(w.pieces) == 1 or w.end - w.start <= window for w in windows)
    order = epoch_order(plan, epoch)
    assert sorted(order) == [(part, row) for part, rows in enumerate(part_rows) for row in range(rows)]
    assert order == epoch_order(plan, epoch)


@given(PART_ROWS, st.integers(1, 9), st.integers(1, 9))
def test_order_does_not_depend_on_step_size_or_length_of_the_run(
    part_rows: list[int], samples: int, epochs: int
) -> None:
    index = index_of(part_rows)
    reference = epoch_order(plan_of(index), 1)
    assert epoch_order(plan_of(index, samples_per_step=samples, num_epochs=epochs, max_steps=7), 1) == reference


def test_seeds_and_epochs_give_different_orders() -> None:
    index = index_of([10] * 10)
    orders = {
        tuple(epoch_order(plan_of(index, seed=seed), epoch)) for seed, epoch in itertools.product(range(4), range(4))
    }
    assert len(orders) == 16


def test_order_is_the_same_in_every_version() -> None:
    """Pinned: another order would break the resumption of runs made with an earlier version."""
    expected = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0), (1, 0), (2, 1)]
    assert epoch_order(plan_of(index_of([3, 2, 2]), shuffle_window=4), 0) == expected


def test_long_rows_make_smaller_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sample_order.WINDOW_TOKENS", 60)
    windows = epoch_windows(plan_of(index_of([10] * 6), shuffle_window=1000), 0)
    assert [len(window.pieces) for window in windows] == [2, 2, 2]


@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 4), st.integers(1, 30))
def test_steps(num_rows: int, samples_per_step: int, num_epochs: int, max_steps: int) -> None:
    plan = plan_of(index_of([num_rows]), samples_per_step=samples_per_step, num_epochs=num_epochs)
    first, *_ = plan.epoch_spans()
    assert (first.end_step - 1) * samples_per_step < num_rows <= first.end_step * samples_per_step
    assert plan.num_steps == num_epochs * first.end_step
    assert plan.epochs == num_epochs
    capped = replace(plan, max_steps=max_steps)
    assert capped.num_steps == max_steps
    assert capped.epochs == pytest.approx(max_steps / first.end_step)
