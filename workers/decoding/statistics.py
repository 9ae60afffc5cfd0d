"""Counts of a decoding run, and the ratios that reports show. Torch-free; counts of several engines can be added."""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class RunStatistics:
    """Sums over all rows of a run.

    Attributes:
        num_rows: rows that got an answer.
        num_errors: rows that could not be done.
        num_model_calls: forwards of the model, whatever the number of rows in them.
        num_row_forwards: the same counted once per row that could get a token: the denominator of tokens per forward.
        num_kept_tokens: tokens of the answers, end tokens included.
        num_query_tokens: tokens that the model processed, prompts and placeholders included.
        num_slot_steps, num_slots_in_use: slots there were, and slots with a row, summed over the forwards.
        model_seconds: spent in forwards of the model and its head.
        engine_seconds: spent in steps besides.
        kept_per_forward: how often a row kept 1, 2, ... tokens of one forward.
    """

    num_rows: int = 0
    num_errors: int = 0
    num_model_calls: int = 0
    num_row_forwards: int = 0
    num_kept_tokens: int = 0
    num_query_tokens: int = 0
    num_slot_steps: int = 0
    num_slots_in_use: int = 0
    model_seconds: float = 0.0
    engine_seconds: float = 0.0
    kept_per_forward: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_forward(self) -> float:
        """Kept tokens / row forwards: sum over sum, not a mean of rows."""
        return self.num_kept_tokens / self.num_row_forwards if self.num_row_forwards else 0.0

    @property
    def query_tokens_per_token(self) -> float:
        """What a kept token cost: tokens processed, prompts included, per kept token."""
        return self.num_query_tokens / self.num_kept_tokens if self.num_kept_tokens else 0.0

    @property
    def engine_seconds_per_step(self) -> float:
        """What a step took besides the forward of the model."""
        return self.engine_seconds / self.num_model_calls if self.num_model_calls else 0.0

    @property
    def slot_occupancy(self) -> float:
        """The share of the slots that held a row, over all forwards."""
        return self.num_slots_in_use / self.num_slot_steps if self.num_slot_steps else 0.0

    def count_kept(self, num_kept: int) -> None:
        """Counts the part of a row in a forward that could give it tokens."""
        self.num_row_forwards += 1
        self.num_kept_tokens += num_kept
        self.kept_per_forward[num_kept] += 1

    def add(self, other: "RunStatistics") -> None:
        """Adds the counts of another engine."""
        for each in fields(self):
            if each.name != "kept_per_forward":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.kept_per_forward.update(other.kept_per_forward)
