"""Where an answer ends: at an end token, behind a stop string, or at its budget."""

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from workers.decoding.request import FinishReason, Result
from workers.decoding.row import Row
from workers.decoding.text import decode, find_stop


def up_to_end(tokens: list[int], end_ids: Collection[int]) -> list[int]:
    """Tokens up to and with the first end token; nothing behind it survives."""
    ends = (place for place, token in enumerate(tokens, start=1) if token in end_ids)
    return tokens[: next(ends, len(tokens))]


def end_of(row: Row, num_new: int, end_ids: Collection[int], tokenizer: PreTrainedTokenizerBase) -> Result | None:
    """The result of a row whose last `num_new` tokens have ended it; None while it goes on.

    Tokens behind the one that completes a stop string are taken off the row.
    """
    has_end = row.token_ids[-1] in end_ids
    stop = row.request.decoding.stop
    if not (has_end or row.num_left == 0 or stop):
        return None
    answer = row.token_ids[row.num_prompt :]
    # The end token is no text; a stop string before it comes first.
    text_ids = answer[:-1] if has_end else answer
    match = find_stop(tokenizer, text_ids, num_new - has_end, stop) if stop else None
    if match is not None:
        del row.token_ids[row.num_prompt + match.num_tokens :]
        del row.logprobs[match.num_tokens :]
        return _result(row, match.text, "stop")
    if has_end or row.num_left == 0:
        return _result(row, decode(tokenizer, text_ids), "stop" if has_end else "length")
    return None


def _result(row: Row, text: str, finish_reason: FinishReason) -> Result:
    return Result(
        id=row.request.id,
        token_ids=tuple(row.token_ids[row.num_prompt :]),
        text=text,
        finish_reason=finish_reason,
        num_prompt_tokens=row.num_prompt,
        num_forwards=row.num_forwards,
        num_query_tokens=row.num_query_tokens,
        kept_per_forward=row.kept_per_forward,
        forwards_per_window=row.forwards_per_window,
        logprobs=tuple(row.logprobs) if row.request.decoding.logprobs else None,
    )
