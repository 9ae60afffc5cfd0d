"""What goes into the decoding engine and what comes out of it. Torch-free."""

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from workers.config import RowDecodingSettings

FinishReason = Literal["stop", "length"]
ErrorCode = Literal["empty_prompt", "prompt_too_long", "mask_in_prompt", "token_out_of_range", "invalid_settings"]


@dataclass(frozen=True)
class Request:
    """One prompt. `decoding.window` null means the engine's block size; `decoding.seed` null derives one from the id."""

    id: str | int
    prompt_ids: tuple[int, ...]
    decoding: RowDecodingSettings


@dataclass(frozen=True)
class RowError:
    """Why a request could not be done. Codes are stable; messages are for people."""

    code: ErrorCode
    message: str


@dataclass(frozen=True)
class Result:
    """The answer to one request, or its error.

    `token_ids` holds every kept token, the end token included. `logprobs`, if asked for, has the natural logarithm of each one's
    share of the distribution that it was drawn from (the softmax of a greedy row). `text` is without end token, without stop
    string and without what stands behind it. `num_forwards` counts the model forwards that could give the row a token,
    `num_query_tokens` the row's tokens and placeholders in all forwards, `kept_per_forward` how often the row kept 1, 2, ... tokens
    of one, `forwards_per_window` how many had which window (`4+branches` with draft branches). With an `error` there is no answer
    and no `finish_reason`.
    """

    id: str | int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_forwards: int
    num_query_tokens: int
    kept_per_forward: Counter[int]
    forwards_per_window: Counter[str] = field(default_factory=Counter)
    logprobs: tuple[float, ...] | None = None
    error: RowError | None = None


@dataclass(frozen=True)
class Progress:
    """What a step gave to one request: new tokens, and the result when they are its last. A stop string may take back tokens that
    earlier steps have told: the result has the last word."""

    ticket: int
    token_ids: tuple[int, ...]
    result: Result | None = None


def failed_result(request: Request, error: RowError) -> Result:
    """The result of a request that cannot be done."""
    return Result(request.id, (), "", None, len(request.prompt_ids), 0, 0, Counter(), error=error)


def find_error(
    request: Request,
    *,
    vocab_size: int,
    mask_token_id: int,
    end_ids: Collection[int],
    max_length: int,
    widest_branched: int,
) -> RowError | None:
    """The first reason why the engine cannot take this request, or None.

    A prompt may hold end and padding tokens, its last token included: they are ordinary tokens there.

    Args:
        request: to be looked at.
        vocab_size: token ids are below it.
        mask_token_id: the placeholder.
        end_ids: tokens that end an answer.
        max_length: prompt and answer tokens of a row.
        widest_branched: the widest window that may have draft branches.
    """
    prompt_ids, decoding = request.prompt_ids, request.decoding
    if not prompt_ids:
        return RowError("empty_prompt", "the prompt has no token")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        return RowError("token_out_of_range", f"prompt token ids must be 0..{vocab_size - 1}")
    if mask_token_id in prompt_ids:
        return RowError("mask_in_prompt", f"the prompt holds the placeholder token {mask_token_id}")
    if len(prompt_ids) >= max_length:
        return RowError(
            "prompt_too_long",
            f"the prompt has {len(prompt_ids)} tokens; max_length {max_length} leaves no room for an answer",
        )
    if any(token >= vocab_size for token in decoding.forbidden_ids):
        return RowError("invalid_settings", f"forbidden_ids must be 0..{vocab_size - 1}")
    early_ids = end_ids if decoding.min_new_tokens else ()
    if len({*decoding.forbidden_ids, mask_token_id, *early_ids}) == vocab_size:
        return RowError("invalid_settings", "forbidden_ids and min_new_tokens leave no token to say")
    if decoding.draft_branches and isinstance(decoding.window, int) and decoding.window > widest_branched:
        return RowError(
            "invalid_settings", f"draft_branches with window {decoding.window}; branches reach up to {widest_branched}"
        )
    return None


def row_seed(request: Request, run_seed: int) -> int:
    """The row's own seed, or a stable hash of (run seed, row id). `1` and `"1"` are different ids."""
    if request.decoding.seed is not None:
        return request.decoding.seed
    name = f"{run_seed}:{type(request.id).__name__}:{request.id}"
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def allowed_window(decoding: RowDecodingSettings, block_size: int) -> int | Literal["auto"]:
    """W of a row: 1 in one-token mode, and where no score could reach the threshold; otherwise as set.

    A threshold of 1.0 is a rule of its own and not a comparison, since the softmax of a float32 model can be exactly 1.0.
    """
    if decoding.mode == "one_token":
        return 1
    if decoding.mode == "verified":
        return "auto" if decoding.window is None else decoding.window
    assert decoding.threshold is not None
    accepts_drafts = decoding.threshold > 0 if decoding.score == "entropy" else decoding.threshold < 1
    if not accepts_drafts:
        return 1
    return block_size if decoding.window is None else decoding.window
