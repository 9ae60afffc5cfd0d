"""Token ids to text, and stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string ended an answer: `num_tokens` tokens complete it, `text` stands before it."""

    num_tokens: int
    text: str


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of an answer: special tokens leave no trace, and nothing is tidied up."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_stop(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], num_new: int, stop: Sequence[str]
) -> StopMatch | None:
    """The first stop string that one of the last `num_new` tokens completes; it may begin in earlier tokens.

    Several tokens at once end where one at a time would.
    """
    # An incomplete character at the end of a prefix reads as U+FFFD, which the whole text may not have.
    is_in_whole_text = not any("\ufffd" in word for word in stop)
    if is_in_whole_text and _cut(decode(tokenizer, token_ids), stop) is None:
        return None
    for num_tokens in range(len(token_ids) - num_new + 1, len(token_ids) + 1):
        text = _cut(decode(tokenizer, token_ids[:num_tokens]), stop)
        if text is not None:
            return StopMatch(num_tokens, text)
    return None


def _cut(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first stop string; None if there is none."""
    places = [place for place in (text.find(word) for word in stop) if place >= 0]
    return text[: min(places)] if places else None
