"""Which cached tokens a query token sees, as the attention masks that a model takes.

The token at position p stands in place p of its slot, so the rule goes by position: a query sees the places up to its own
position, and in a layer with a sliding window only those that are less than the window away.

Shapes: B rows, Q query tokens of a row, T places of a slot that are read.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from workers.errors import InputError
from workers.objectives.attention import attention_windows

AttentionMask = Tensor | dict[str, Tensor]


class Visibility:
    """Makes the masks of one model.

    Raises:
        InputError: the model's attention takes no mask of its own, or has layers that a mask by position cannot express.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self._windows = attention_windows(config)
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise InputError("attention", implementation, "sdpa or eager", "Other kernels take no mask of their own.")
        # `sdpa` takes booleans; `eager` adds the mask to the scores.
        self._is_additive = implementation == "eager"
        self._dtype = dtype

    def masks(self, position_BQ: Tensor, num_places: int) -> AttentionMask:
        """One mask (B, 1, Q, T), or one for each layer type when a model has several."""
        place_T = torch.arange(num_places, device=position_BQ.device)
        position_B1Q1 = position_BQ[:, None, :, None]
        is_past_B1QT = place_T <= position_B1Q1
        masks = {}
        for layer_type, window in self._windows.items():
            mask_B1QT = is_past_B1QT
            if window is not None:
                mask_B1QT = mask_B1QT & (place_T > position_B1Q1 - window)
            masks[layer_type] = self._additive(mask_B1QT) if self._is_additive else mask_B1QT
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, mask_B1QT: Tensor) -> Tensor:
        zeros_B1QT = torch.zeros(mask_B1QT.shape, dtype=self._dtype, device=mask_B1QT.device)
        return zeros_B1QT.masked_fill_(~mask_B1QT, torch.finfo(self._dtype).min)
