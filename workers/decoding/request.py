"""What goes into the decoding engine and what comes out of it. Torch-free."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from workers.config import RowDecodingSettings

FinishReason = Literal["stop", "length"]
ErrorCode = Literal["empty_prompt", "prompt_too_long", "mask_in_prompt", "token_out_of_range"]


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

    `token_ids` holds every kept token, the end token included. `text` is without end token, without stop string and without what
    stands behind it. `num_forwards` counts the model forwards that included the row, `num_query_tokens` the row's tokens and
    placeholders in them, `kept_per_forward` how often the row kept 1, 2, ... tokens of one. With an `error` there is no answer and
    no `finish_reason`.
    """

    id: str | int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_forwards: int
    num_query_tokens: int
    kept_per_forward: Counter[int]
    error: RowError | None = None


def failed_result(request: Request, error: RowError) -> Result:
    """The result of a request that cannot be done."""
    return Result(request.id, (), "", None, len(request.prompt_ids), 0, 0, Counter(), error)


def find_error(request: Request, *, vocab_size: int, mask_token_id: int, max_length: int) -> RowError | None:
    """The first reason why the engine cannot take this request, or None.

    A prompt may hold end and padding tokens, its last token included: they are ordinary tokens there.
    """
    prompt_ids = request.prompt_ids
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
    return None


def row_seed(request: Request, run_seed: int) -> int:
    """The row's own seed, or a stable hash of (run seed, row id). `1` and `"1"` are different ids."""
    if request.decoding.seed is not None:
        return request.decoding.seed
    name = f"{run_seed}:{type(request.id).__name__}:{request.id}"
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def allowed_window(decoding: RowDecodingSettings, block_size: int) -> int:
    """W of a row: 1 in one-token mode, and where no score could reach the threshold; otherwise as set.

    A threshold of 1.0 is a rule of its own and not a comparison, since the softmax of a float32 model can be exactly 1.0.
    """
    if decoding.threshold is None:
        return 1
    accepts_drafts = decoding.threshold > 0 if decoding.score == "entropy" else decoding.threshold < 1
    if not accepts_drafts:
        return 1
    return block_size if decoding.window is None else decoding.window
