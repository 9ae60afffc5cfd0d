"""One request while it waits and runs. Plain Python."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from workers.decoding.request import Request


@dataclass(eq=False)
class Row:
    """The state of a request.

    `token_ids` is prompt and answer so far. The keys and values of its first `num_cached` tokens are in the cache, in the slot's
    places 0..num_cached-1; the others are pending. `drafts` are proposals for the tokens behind (verified mode). `border` is the
    length at which the row waits for the others (block cache), `prefix` what it takes from another row. The counts are those of the
    row's result.
    """

    request: Request
    ticket: int
    seed: int
    window: int | Literal["auto"]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    num_cached: int = 0
    border: int | None = None
    num_forwards: int = 0
    num_query_tokens: int = 0
    kept_per_forward: Counter[int] = field(default_factory=Counter)
    forwards_per_window: Counter[str] = field(default_factory=Counter)
    logprobs: list[float] = field(default_factory=list)
    slot: int = -1
    prefix: "Prefix | None" = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_left(self) -> int:
        """Tokens that the row may still emit."""
        return self.max_tokens - len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that have no keys and values in the cache."""
        return len(self.token_ids) - self.num_cached

    @property
    def room(self) -> int:
        """Tokens that one forward may keep."""
        to_border = self.num_left if self.border is None else self.border - len(self.token_ids)
        return min(self.num_left, to_border)

    @property
    def is_new(self) -> bool:
        """Whether no forward has given the row a token yet."""
        return self.num_forwards == 0


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, which another row has too."""

    source: Row
    num_tokens: int
