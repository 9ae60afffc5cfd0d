"""MARS (arXiv 2604.07023): several tokens per forward from ordinary tokens and `[MASK]` placeholders.

Each response is cut into blocks. The first token of a block is predicted from the clean position before it; token
i >= 2 from the block's placeholder i-1, which stands at the position of token i-1 and sees the clean tokens before
the block and the placeholders of its block up to itself. AR SFT is block size 1 without the mask loss.

Shapes: M placeholders, N predictions, T response tokens of one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.objectives.streams import (
    Document,
    PackedBatch,
    Sample,
    block_starts,
    pack_documents,
    padding_batch,
    response_phases,
)


@dataclass(frozen=True)
class MarsObjective:
    """What is predicted from what, and how much it counts.

    Args:
        block_size: B, tokens predicted in one forward; 1 is plain next-token prediction.
        ar_weight: weight of the next-token loss on the clean stream; 0 leaves it out.
        mask_weight: weight of the loss over all response tokens by blocks; 0 leaves it and the noisy stream out.
        random_block_phase: shift the cuts of each response by a random offset in [0, B); the paper does not.
        mask_token_id: the placeholder; may stand in no response.
        seed: seed of the offsets.
    """

    block_size: int
    ar_weight: float
    mask_weight: float
    random_block_phase: bool
    mask_token_id: int
    seed: int

    def __post_init__(self) -> None:
        assert self.block_size >= 1
        assert self.ar_weight >= 0 and self.mask_weight >= 0 and self.ar_weight + self.mask_weight > 0

    def pack(self, samples: Sequence[Sample], *, row_tokens: int, micro_batch_rows: int) -> list[PackedBatch]:
        """Micro-batches of rows of at most `row_tokens` positions, both streams together; nothing is dropped."""
        documents = [self.document(sample) for sample in samples]
        return pack_documents(documents, row_tokens=row_tokens, micro_batch_rows=micro_batch_rows)

    def empty_batch(self) -> PackedBatch:
        """A batch of weight zero, for a rank without samples."""
        return padding_batch()

    def document(self, sample: Sample) -> Document:
        """The two streams of one sample.

        The token at position 0 has no clean predecessor, so nothing predicts it: a response that begins there is
        trained on from its second token.
        """
        token_ids = sample.token_ids.astype(np.int64)
        target_T, begin_T = self._targets(sample)
        assert not np.any(token_ids[target_T] == self.mask_token_id), "the mask id stands in a response"

        is_first_T = target_T == begin_T
        follower_T = target_T[~is_first_T] if self.mask_weight > 0 else target_T[:0]
        begin_M = begin_T[~is_first_T] if self.mask_weight > 0 else begin_T[:0]
        in_ar_T = np.full(len(target_T), self.ar_weight > 0)
        in_mask_T = is_first_T & (self.mask_weight > 0)
        is_used_T = in_ar_T | in_mask_T
        num_placeholders = len(follower_T)
        return Document(
            clean_ids_C=token_ids,
            clean_limit_C=np.arange(len(token_ids)),
            noisy_ids_M=np.full(num_placeholders, self.mask_token_id, dtype=np.int64),
            noisy_position_M=follower_T - 1,
            noisy_block_M=np.cumsum(np.diff(begin_M, prepend=-1) != 0),
            noisy_limit_M=begin_M - 1,
            source_N=np.concatenate([target_T[is_used_T] - 1, len(token_ids) + np.arange(num_placeholders)]),
            label_N=token_ids[np.concatenate([target_T[is_used_T], follower_T])],
            in_ar_loss_N=np.concatenate([in_ar_T[is_used_T], np.zeros(num_placeholders, dtype=np.bool_)]),
            in_mask_loss_N=np.concatenate([in_mask_T[is_used_T], np.ones(num_placeholders, dtype=np.bool_)]),
            num_response_tokens=len(target_T),
        )

    def _targets(self, sample: Sample) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The positions of all predicted tokens, and for each the position at which its block begins, (T,) each."""
        phases = [0] * len(sample.responses)
        if self.random_block_phase:
            phases = response_phases(self.seed, sample, self.block_size).tolist()
        spans = [(max(start, 1), end) for start, end in sample.responses]
        targets = [np.arange(start, end) for start, end in spans]
        begins = [
            block_starts(start, end, self.block_size, phase) for (start, end), phase in zip(spans, phases, strict=True)
        ]
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *targets]), np.concatenate([none, *begins])
