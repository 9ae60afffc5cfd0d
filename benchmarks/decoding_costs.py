"""What a step costs by window, whatever its drafts are worth.

A window of W is a verified step in which each row has W query tokens, its last one and W - 1 placeholders, whose logits are all
looked at; drafts are dropped, for with drafts to check a step has more query tokens, up to 2 W - 1 without branches.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.decoding_comparison import WINDOWS
from benchmarks.decoding_drafts import AgreeingEngine, Agreement
from benchmarks.decoding_methods import Clock, make_engine, make_requests
from benchmarks.decoding_models import Subject, walk
from benchmarks.decoding_work import Work

# Prompts so short that all are read in one step; budgets that no row reaches within the steps.
PROMPT_TOKENS, FIRST_STEPS, TIMED_STEPS, QUICK_TIMED_STEPS = 16, 1, 12, 3


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step and its query tokens, by window: one entry for each repeat. A window of 1 is one-token mode."""

    batch_size: int
    seconds: dict[int, list[float]] = field(default_factory=dict)
    query_tokens: dict[int, list[float]] = field(default_factory=dict)

    def ratios(self) -> dict[int, list[float]]:
        """Seconds of a step / seconds of a one-token step of the same repeat."""
        reference = self.seconds[1]
        return {
            window: [value / one for value, one in zip(seconds, reference, strict=True)]
            for window, seconds in self.seconds.items()
        }

    def rows(self) -> list[list[Any]]:
        """One line of the table for each window."""
        return [
            [
                self.batch_size,
                window,
                statistics.median(self.query_tokens[window]),
                1000 * statistics.median(self.seconds[window]),
                statistics.median(ratios),
                f"{min(ratios):.2f}..{max(ratios):.2f}",
            ]
            for window, ratios in self.ratios().items()
        ]


HEADERS = ("batch", "window", "query tokens/step", "ms/step", "of a one-token step", "min..max")


def measure_step_costs(
    subject: Subject, batch_size: int, num_repeats: int, num_steps: int, told: Callable[[str], None]
) -> StepCosts:
    """Steps in which all rows decode, in turns over the windows."""
    generator = np.random.default_rng(0)
    if subject.is_walk:
        prompts = [tuple(walk(generator, PROMPT_TOKENS)) for _ in range(batch_size)]
    else:
        prompts = [
            tuple(generator.integers(0, subject.mask_token_id, size=PROMPT_TOKENS).tolist()) for _ in range(batch_size)
        ]
    # The rows keep a token a step, and have room for the widest window to the last.
    budget = FIRST_STEPS + num_steps + max(WINDOWS) + 1
    work = Work(tuple(prompts), (budget,) * batch_size, frozenset())
    costs = StepCosts(batch_size)
    windows = [1, *(window for window in WINDOWS if window <= subject.block_size)]
    for repeat in range(num_repeats):
        turn = repeat * len(windows) // num_repeats
        for window in windows[turn:] + windows[:turn]:
            seconds, query_tokens = _time_steps(subject, work, window, num_steps)
            costs.seconds.setdefault(window, []).append(seconds)
            costs.query_tokens.setdefault(window, []).append(query_tokens)
        told(f"batch {batch_size}, cost of a step: {repeat + 1} of {num_repeats} repeats")
    return costs


def _time_steps(subject: Subject, work: Work, window: int, num_steps: int) -> tuple[float, float]:
    """Seconds and query tokens of a step, means of those behind the first ones; the rows are left unfinished."""
    settings: dict[str, Any] = {"mode": "one_token"}
    if window > 1:
        settings = {"mode": "verified", "window": window, "draft_branches": False}
    engine = make_engine(subject, "ragged", len(work.prompts), work.max_length, work.end_ids, AgreeingEngine)
    assert isinstance(engine, AgreeingEngine)
    engine.agreement = Agreement(((),) * len(work.prompts))
    for request in make_requests(work, settings):
        engine.submit(request)
    for _ in range(FIRST_STEPS):
        engine.step()
    num_before = engine.statistics.num_query_tokens
    clock = Clock(subject.device)
    for _ in range(num_steps):
        engine.step()
    seconds, _ = clock.seconds()
    assert engine.statistics.num_rows == 0, "a row ended before the steps did"
    return seconds / num_steps, (engine.statistics.num_query_tokens - num_before) / num_steps
