"""Counts of a decoding run, and the ratios that reports show. Torch-free; counts of several engines can be added."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class RunStatistics:
    """Sums over all rows of a run.

    Attributes:
        num_rows: rows that got an answer.
        num_errors: rows that could not be done.
        num_model_calls: forwards of the model, whatever the number of rows in them.
        num_row_forwards: the same counted once per row: the denominator of tokens per forward.
        num_kept_tokens: tokens of the answers, end tokens included.
        num_query_tokens: tokens that the model processed, placeholders included, padding not.
        num_padding_tokens: padding that the model processed.
        kept_per_forward: how often a row kept 1, 2, ... tokens of one forward.
    """

    num_rows: int = 0
    num_errors: int = 0
    num_model_calls: int = 0
    num_row_forwards: int = 0
    num_kept_tokens: int = 0
    num_query_tokens: int = 0
    num_padding_tokens: int = 0
    kept_per_forward: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_forward(self) -> float:
        """Kept tokens / row forwards: sum over sum, not a mean of rows."""
        return self.num_kept_tokens / self.num_row_forwards if self.num_row_forwards else 0.0

    @property
    def query_tokens_per_token(self) -> float:
        """What a kept token cost: tokens processed, prompts included, per kept token."""
        return self.num_query_tokens / self.num_kept_tokens if self.num_kept_tokens else 0.0

    def count_forward(self, num_kept: list[int], num_query_tokens: int, num_cells: int) -> None:
        """Counts one model call: kept tokens of each row in it, query tokens in sum, and query tokens with padding."""
        self.num_model_calls += 1
        self.num_row_forwards += len(num_kept)
        self.num_kept_tokens += sum(num_kept)
        self.num_query_tokens += num_query_tokens
        self.num_padding_tokens += num_cells - num_query_tokens
        self.kept_per_forward.update(num_kept)

    def add(self, other: "RunStatistics") -> None:
        """Adds the counts of another engine."""
        self.num_rows += other.num_rows
        self.num_errors += other.num_errors
        self.num_model_calls += other.num_model_calls
        self.num_row_forwards += other.num_row_forwards
        self.num_kept_tokens += other.num_kept_tokens
        self.num_query_tokens += other.num_query_tokens
        self.num_padding_tokens += other.num_padding_tokens
        self.kept_per_forward.update(other.kept_per_forward)
