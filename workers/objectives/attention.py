"""The attention masks of packed rows, dense for SDPA and eager attention, in blocks for FlexAttention.

Shapes: B rows, L positions of a row (queries and keys alike).
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from workers.models.attention_masks import (
    AttentionMask,
    attention_windows,
    pack_by_layer_type,
    pack_masks,
    takes_additive_masks,
    takes_block_masks,
)
from workers.objectives.block_mask import build_block_mask
from workers.objectives.streams import Places
from workers.objectives.visibility import is_visible


def dense_visibility(places: Places, sliding_window: int | None = None) -> Tensor:
    """The rule for all pairs of a row, boolean (B, 1, L, L)."""
    query = Places(*(vector_BL[:, None, :, None] for vector_BL in places))
    key = Places(*(vector_BL[:, None, None, :] for vector_BL in places))
    return is_visible(query, key, sliding_window)


def build_attention_mask(model: PreTrainedModel, places: Places) -> AttentionMask | BlockMask | dict[str, BlockMask]:
    """The mask in the form that `model` takes: one (B, 1, L, L) mask, or one for each layer type when they differ.

    Raises:
        InputError: the model has layers that are neither full nor sliding-window attention, or another attention
            implementation.
    """
    windows = attention_windows(model.config)
    if takes_block_masks(model.config):
        return _block_masks(places, windows)
    return pack_masks(
        {name: dense_visibility(places, window) for name, window in windows.items()},
        is_additive=takes_additive_masks(model.config),
        dtype=model.dtype,
    )


def _block_masks(places: Places, windows: Mapping[str, int | None]) -> BlockMask | dict[str, BlockMask]:
    return pack_by_layer_type({name: build_block_mask(places, window) for name, window in windows.items()})
