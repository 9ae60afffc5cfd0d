"""The automatic window, with made-up costs and acceptance: wide where drafts pay, one token where they do not."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.decoding.window import AcceptanceStatistics, StepCosts, WindowChoice, WindowChooser

ONE_TOKEN = WindowChoice(1, False)


def chooser_of(measure, *, block_size: int = 8, mode: str = "verified", num_slots: int = 8) -> WindowChooser:
    return WindowChooser(block_size, StepCosts(measure, num_slots), mode)


def flat(num_rows: int, num_lanes: int, num_picks: int) -> float:
    """A GPU that waits for its memory: all small forwards cost the same."""
    return 0.01


def steep(num_rows: int, num_lanes: int, num_picks: int) -> float:
    """A busy machine: each query token costs as much as the first."""
    return 0.01 * num_rows * num_lanes


def teach(chooser: WindowChooser, share: float, *, num_steps: int = 400, num_drafts: int = 7, seed: int = 0) -> None:
    random = Random(seed)
    for _ in range(num_steps):
        chooser.age()
        num_accepted = next((depth for depth in range(num_drafts) if random.random() >= share), num_drafts)
        chooser.observe(num_drafts, num_accepted)


@pytest.mark.parametrize("mode", ["verified", "tau"])
@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_the_widest_window_when_forwards_cost_the_same_and_all_drafts_are_right(mode, block_size):
    chooser = chooser_of(flat, block_size=block_size, mode=mode)
    teach(chooser, 1.0, num_drafts=block_size - 1)
    assert chooser.choose(4).window == block_size


@pytest.mark.parametrize("mode", ["verified", "tau"])
def test_one_token_when_drafts_are_never_right(mode):
    chooser = chooser_of(lambda *size: 0.01 + 0.0005 * size[1], mode=mode)
    teach(chooser, 0.0)
    assert chooser.choose(4) == ONE_TOKEN


@pytest.mark.parametrize("mode", ["verified", "tau"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.8])
def test_one_token_when_each_query_token_costs_as_much_as_the_first(mode, share):
    for seed in range(5):
        chooser = chooser_of(steep, mode=mode)
        teach(chooser, share, seed=seed)
        assert chooser.choose(4) == ONE_TOKEN
        assert chooser.choose(4, branches=True).window == 1


def test_costs_of_the_head_count():
    """Forwards cost the same, but each further row of logits as much as a forward."""
    chooser = chooser_of(lambda num_rows, num_lanes, num_picks: 0.01 * num_picks)
    teach(chooser, 0.5)
    assert chooser.choose(4) == ONE_TOKEN


def test_branches_where_they_pay_and_only_there():
    """Drafts that are often wrong: branches keep drafting after a rejection. With dear query tokens they cost too much."""
    cheap, dear = chooser_of(flat, block_size=4), chooser_of(lambda *size: 0.01 + 0.002 * size[1], block_size=4)
    for chooser in (cheap, dear):
        teach(chooser, 0.6, num_drafts=3)
    assert cheap.choose(2) == WindowChoice(4, True)
    assert not dear.choose(2).has_branches and dear.choose(2).window > 1
    assert cheap.choose(2, branches=False) == WindowChoice(4, False)
    assert dear.choose(2, branches=True).has_branches


def test_tau_mode_never_has_branches():
    chooser = chooser_of(flat, mode="tau")
    teach(chooser, 0.6)
    assert not chooser.choose(2).has_branches


def test_a_window_between_one_and_the_widest():
    """Drafts two deep are right, those behind never: anything wider is paid for and not used."""
    chooser = chooser_of(lambda *size: 0.01 + 0.0005 * size[1])
    for _ in range(300):
        chooser.age()
        chooser.observe(7, 2)
    assert chooser.choose(1).window == 3


def test_block_size_1_is_one_token_and_measures_nothing():
    chooser = chooser_of(lambda *size: pytest.fail("measured"), block_size=1)
    assert [chooser.choose(3, branches) for branches in (None, True, False)] == [ONE_TOKEN] * 3


@pytest.mark.parametrize("wishes", [[None], [False], [True], [None, True], [None, True, False]])
def test_one_token_looks_again_now_and_then(wishes):
    """Two steps in a row, for one drafts and the next checks, however many kinds of rows there are; and it goes back to drafts
    when they have become right."""
    chooser = chooser_of(lambda *size: 0.01 + 0.0005 * size[1])
    teach(chooser, 0.0)
    windows = {wish: [] for wish in wishes}
    for _ in range(600):
        for wish in wishes:
            windows[wish].append(chooser.choose(2, wish).window)
    for chosen in windows.values():
        trials = [place for place, window in enumerate(chosen) if window > 1]
        assert 4 <= len(trials) <= 24
        assert all(b == a + 1 for a, b in zip(trials[::2], trials[1::2], strict=True))
        assert {chosen[place] for place in trials} == {2}
    teach(chooser, 1.0, num_drafts=1, num_steps=200)
    assert chooser.choose(2, wishes[0]).window > 1


def simulated_rate(choice: WindowChoice, shares: list[float], costs: StepCosts, num_rows: int, random: Random) -> float:
    """Tokens per second of a row that is decoded with one choice for a long time; each draft is right by chance."""
    tokens, seconds, num_drafts = 0, 0.0, 0
    width = choice.window
    for _ in range(4000):
        num_runs = width if choice.has_branches else 1
        num_lanes = 1 + num_drafts + num_runs * (width - 1)
        seconds += costs.seconds(num_rows, num_lanes, num_drafts + width)
        num_accepted = next((depth for depth in range(num_drafts) if random.random() >= shares[depth]), num_drafts)
        tokens += num_accepted + 1
        num_drafts = width - 1 if choice.has_branches or num_accepted == num_drafts else 0
    return tokens / seconds


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    share=st.floats(0, 1),
    first=st.floats(0.001, 0.1),
    per_token=st.floats(0, 0.01),
    per_pick=st.floats(0, 0.005),
    num_rows=st.integers(1, 8),
    branches=st.sampled_from([None, True, False]),
    seed=st.integers(0, 999),
)
def test_the_choice_is_never_slower_than_one_token(share, first, per_token, per_pick, num_rows, branches, seed):
    """And about as fast as the best one, by a simulation that draws each draft."""
    chooser = chooser_of(lambda rows, lanes, picks: first + per_token * rows * lanes + per_pick * (picks - 1))
    teach(chooser, share, seed=seed)
    shares, costs = chooser._statistics.shares(), chooser._costs
    chosen = chooser.choose(num_rows, branches)
    kinds = [False, True] if branches is None else [branches]
    rates = {
        choice: simulated_rate(choice, shares, costs, num_rows, Random(seed))
        for choice in {ONE_TOKEN, chosen, *(WindowChoice(window, kind) for window in (2, 4, 8) for kind in kinds)}
    }
    assert rates[chosen] >= 0.97 * rates[ONE_TOKEN]
    assert rates[chosen] >= 0.93 * max(rates.values())


def test_shares_follow_the_drafts_and_forget():
    statistics = AcceptanceStatistics(3)
    for _ in range(300):
        statistics.age()
        statistics.observe(3, 1)
    first, second, third = statistics.shares()
    assert first > 0.95
    assert second < 0.05
    # The third was never reached; it is taken for as good as the second.
    assert third == pytest.approx(second)
    for _ in range(300):
        statistics.age()
        statistics.observe(3, 0)
    assert statistics.shares()[0] < 0.05
    for _ in range(400):
        statistics.age()
    # Nothing has been seen for long: what is taken for granted at the start.
    assert statistics.shares() == pytest.approx([0.7] * 3, abs=0.01)
    statistics.observe(9, 9)


def test_costs_are_measured_once_for_each_power_of_two_rows():
    sizes = []

    def measure(*size: int) -> float:
        sizes.append(size)
        return 0.001 * size[1]

    costs = StepCosts(measure, num_slots=6)
    assert not sizes
    assert costs.seconds(3, 3, 1) == pytest.approx(0.003)
    assert costs.seconds(3, 10, 1) == pytest.approx(0.010)
    num_measured = len(sizes)
    assert {rows for rows, _, _ in sizes} == {4}
    costs.seconds(4, 7, 5)
    assert len(sizes) == num_measured
    costs.seconds(5, 7, 5)
    assert {rows for rows, _, _ in sizes} == {4, 6}
    assert max(lanes for _, lanes, _ in sizes) == 64


def test_forwards_that_take_long_are_not_measured_but_extrapolated():
    sizes = []

    def measure(num_rows: int, num_lanes: int, num_picks: int) -> float:
        sizes.append(num_lanes)
        return 0.97 + 0.03 * num_lanes

    costs = StepCosts(measure, num_slots=1)
    assert costs.seconds(1, 40, 1) == pytest.approx(0.97 + 0.03 * 40)
    assert sorted(set(sizes)) == [1, 2, 4]
    assert math.isfinite(costs.seconds(6, 4096, 127))


@pytest.mark.parametrize("block_size", range(1, 17))
def test_nothing_larger_is_measured_than_a_window_may_ask_for(block_size):
    sizes = []
    costs = StepCosts(lambda *size: sizes.append(size) or 0.001, num_slots=2, most_lanes=block_size**2)
    costs.seconds(2, block_size**2, 2 * block_size - 1)
    assert max(lanes for _, lanes, _ in sizes) == block_size**2
    assert max(picks for _, _, picks in sizes) <= max(2 * block_size - 1, 1)


def test_a_wide_window_is_found_again_when_its_drafts_have_become_right():
    """Stuck at a window of 2, the third token would never be drafted again."""
    chooser = chooser_of(lambda *size: 1.0 + 0.03 * size[1])
    for _ in range(100):
        chooser.age()
        chooser.observe(7, 1)
    assert chooser.choose(1).window == 2
    windows = []
    for _ in range(600):
        chooser.age()
        windows.append(chooser.choose(1).window)
        chooser.observe(windows[-1] - 1, windows[-1] - 1)
    assert windows[-1] == 8
