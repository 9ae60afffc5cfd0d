"""Which cached tokens a query token sees, as the attention masks that a model takes.

The token at position p stands in place p of its slot, so the rule goes by position: a query sees the places up to its own
position, and in a layer with a sliding window only those that are less than the window away.

Shapes: B rows, Q query tokens of a row, T places of a slot that are read.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from workers.models.attention_masks import AttentionMask, attention_windows, pack_masks, takes_additive_masks


class Visibility:
    """Makes the masks of one model.

    Raises:
        InputError: the model's attention takes no mask of its own, or has layers that a mask by position cannot express.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self._windows = attention_windows(config)
        self._is_additive = takes_additive_masks(config)
        self._dtype = dtype

    def masks(self, position_BQ: Tensor, num_places: int) -> AttentionMask:
        """One mask (B, 1, Q, T), or one for each layer type when a model has several."""
        place_T = torch.arange(num_places, device=position_BQ.device)
        position_B1Q1 = position_BQ[:, None, :, None]
        is_past_B1QT = place_T <= position_B1Q1
        visible = {
            layer_type: is_past_B1QT if window is None else is_past_B1QT & (place_T > position_B1Q1 - window)
            for layer_type, window in self._windows.items()
        }
        return pack_masks(visible, is_additive=self._is_additive, dtype=self._dtype)
