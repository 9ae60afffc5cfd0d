"""The attention rule as block lists for FlexAttention (arXiv 2412.05496): memory grows with the length, not its square.

Shapes: B rows, L positions of a row, Q query blocks and K key blocks of 128 positions, S positions inside a block.
"""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from workers.objectives.streams import Places
from workers.objectives.visibility import is_visible

BLOCK = 128  # what the kernels of FlexAttention are tuned for


def build_block_mask(places: Places, sliding_window: int | None = None) -> BlockMask:
    """The rule for all pairs of a row, exactly, in the form that `flex_attention` takes; heads share it.

    A block of pairs is left out when nobody in it is seen, goes without the rule when everybody is, and is decided pair by
    pair otherwise. One block of queries is looked at after the other, (B, 128, L) at a time: `create_block_mask` would
    look at all pairs at once.
    """
    # int32 halves what the kernel reads for each pair; positions and documents stay far below 2^31
    narrow = Places(*(vector_BL.to(torch.int32) for vector_BL in places))
    length = narrow.document.shape[1]
    blocks = [_classify(narrow, start, sliding_window) for start in range(0, length, BLOCK)]
    is_partial_B1QK = torch.stack([is_partial_BK for is_partial_BK, _ in blocks], dim=1)[:, None]
    is_full_B1QK = torch.stack([is_full_BK for _, is_full_BK in blocks], dim=1)[:, None]

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return is_visible(
            Places(*(vector_BL[row, query] for vector_BL in narrow)),
            Places(*(vector_BL[row, key] for vector_BL in narrow)),
            sliding_window,
        )

    return BlockMask.from_kv_blocks(
        *_counts_and_indices(is_partial_B1QK),
        *_counts_and_indices(is_full_B1QK),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(length, length),
    )


def _classify(places: Places, start: int, sliding_window: int | None) -> tuple[Tensor, Tensor]:
    """Which key blocks the queries from `start` on see in part, and which they see whole, boolean (B, K) each.

    A block at the end that is not filled counts as seen in part, as the pairs beyond the end are not seen.
    """
    query = Places(*(vector_BL[:, start : start + BLOCK, None] for vector_BL in places))
    key = Places(*(vector_BL[:, None, :] for vector_BL in places))
    visible_BSL = is_visible(query, key, sliding_window)
    seen_BL = visible_BSL.sum(dim=1, dtype=torch.int32)
    num_missing = -seen_BL.shape[1] % BLOCK
    seen_BK = nn.functional.pad(seen_BL, (0, num_missing)).unflatten(1, (-1, BLOCK)).sum(dim=2)
    is_full_BK = seen_BK == BLOCK * BLOCK
    return (seen_BK > 0) & ~is_full_BK, is_full_BK


def _counts_and_indices(is_listed_B1QK: Tensor) -> tuple[Tensor, Tensor]:
    """For each query block how many key blocks are listed, (B, 1, Q), and which, in order and first, (B, 1, Q, K)."""
    indices_B1QK = is_listed_B1QK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return is_listed_B1QK.sum(dim=-1, dtype=torch.int32), indices_B1QK.to(torch.int32).contiguous()
