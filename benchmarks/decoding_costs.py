"""What a step costs by window, whatever its drafts are worth: also measured with random weights, which accept none."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.decoding_comparison import ONE_TOKEN, fixed_windows
from benchmarks.decoding_methods import Clock, make_engine, make_requests
from benchmarks.decoding_models import Subject, walk
from benchmarks.decoding_work import Work

# Prompts so short that all are read in one step; budgets that no row reaches within the steps.
PROMPT_TOKENS, BUDGET, FIRST_STEPS, TIMED_STEPS = 16, 160, 3, 12


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step and its query tokens, by window: one entry for each repeat."""

    batch_size: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    query_tokens: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self) -> dict[str, list[float]]:
        """Seconds of a step / seconds of a one-token step of the same repeat."""
        reference = self.seconds[ONE_TOKEN]
        return {
            name: [value / one for value, one in zip(seconds, reference, strict=True)]
            for name, seconds in self.seconds.items()
        }

    def rows(self) -> list[list[Any]]:
        """One line of the table for each window."""
        return [
            [
                self.batch_size,
                name,
                statistics.median(self.query_tokens[name]),
                1000 * statistics.median(self.seconds[name]),
                statistics.median(ratios),
                f"{min(ratios):.2f}..{max(ratios):.2f}",
            ]
            for name, ratios in self.ratios().items()
        ]


HEADERS = ("batch", "window", "query tokens/step", "ms/step", "of a one-token step", "min..max")


def measure_step_costs(subject: Subject, batch_size: int, num_repeats: int, told: Callable[[str], None]) -> StepCosts:
    """Steps in which all rows decode, in turns over the windows."""
    generator = np.random.default_rng(0)
    if subject.is_walk:
        prompts = [tuple(walk(generator, PROMPT_TOKENS)) for _ in range(batch_size)]
    else:
        prompts = [
            tuple(generator.integers(0, subject.mask_token_id, size=PROMPT_TOKENS).tolist()) for _ in range(batch_size)
        ]
    budget = min(BUDGET, subject.model.config.max_position_embeddings - PROMPT_TOKENS)
    work = Work(tuple(prompts), (budget,) * batch_size, frozenset())
    costs = StepCosts(batch_size)
    variants: dict[str, dict[str, Any]] = {ONE_TOKEN: {"mode": "one_token"}, **fixed_windows(subject.block_size)}
    names = list(variants)
    for repeat in range(num_repeats):
        turn = repeat * len(names) // num_repeats
        for name in names[turn:] + names[:turn]:
            seconds, query_tokens = _time_steps(subject, work, variants[name])
            costs.seconds.setdefault(name, []).append(seconds)
            costs.query_tokens.setdefault(name, []).append(query_tokens)
        told(f"batch {batch_size}, cost of a step: {repeat + 1} of {num_repeats} repeats")
    return costs


def _time_steps(subject: Subject, work: Work, settings: dict[str, Any]) -> tuple[float, float]:
    """Seconds and query tokens of a step, means of those behind the first ones; the rows are left unfinished.

    Means, for steps differ: without branches a rejection leaves no drafts for the next step.
    """
    engine = make_engine(subject, "ragged", len(work.prompts), work.max_length, work.end_ids)
    for request in make_requests(work, settings):
        engine.submit(request)
    for _ in range(FIRST_STEPS):
        engine.step()
    num_before = engine.statistics.num_query_tokens
    clock = Clock(subject.device)
    for _ in range(TIMED_STEPS):
        engine.step()
    seconds, _ = clock.seconds()
    assert engine.statistics.num_rows == 0, "a row ended before the steps did"
    return seconds / TIMED_STEPS, (engine.statistics.num_query_tokens - num_before) / TIMED_STEPS
