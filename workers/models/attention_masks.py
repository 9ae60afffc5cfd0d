"""Attention masks of our own, in the form that a model takes: for each layer type what its window lets it see.

Shapes: B rows, Q queries, T keys.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from workers.errors import InputError

FULL = "full_attention"
SLIDING = "sliding_attention"
FLEX = "flex_attention"
AttentionMask = Tensor | dict[str, Tensor]
M = TypeVar("M")


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The sliding window of each layer type of a model; None for full attention.

    Models without a list of layer types use the window, if they have one, in every layer (Mistral).

    Raises:
        InputError: a layer type that a mask by position cannot express (chunked, linear, recurrent).
    """
    config = config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return {FULL: None} if window is None else {SLIDING: window}
    unknown = sorted(set(layer_types) - {FULL, SLIDING})
    if unknown:
        raise InputError(
            f"model type {config.model_type}", f"layers of type {', '.join(unknown)}", f"{FULL} or {SLIDING} layers"
        )
    if window is None and SLIDING in layer_types:
        raise InputError(f"model type {config.model_type}", "sliding layers and no sliding_window", "a sliding_window")
    return {layer_type: window if layer_type == SLIDING else None for layer_type in sorted(set(layer_types))}


def takes_block_masks(config: PreTrainedConfig) -> bool:
    """Whether the model takes block lists (`flex_attention`) instead of a value for each pair."""
    return bool(config._attn_implementation == FLEX)


def takes_additive_masks(config: PreTrainedConfig) -> bool:
    """Whether the model adds a mask to its scores (`eager`) instead of taking booleans (`sdpa`).

    Raises:
        InputError: another attention implementation.
    """
    implementation: str = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise InputError("attention", implementation, "sdpa or eager", "Other kernels take no dense mask.")
    return implementation == "eager"


def pack_masks(visible: Mapping[str, Tensor], *, is_additive: bool, dtype: torch.dtype) -> AttentionMask:
    """The masks of a forward from what the queries of each layer type see, boolean (B, 1, Q, T).

    An additive mask has 0 and the lowest number of `dtype`. A model with one layer type takes a tensor, one with several a dict.
    """
    return pack_by_layer_type(
        {name: _additive(mask_B1QT, dtype) if is_additive else mask_B1QT for name, mask_B1QT in visible.items()}
    )


def pack_by_layer_type(masks: Mapping[str, M]) -> M | dict[str, M]:
    """What a model takes: the mask itself when all layers are of one type, a dict when they are of several."""
    return dict(masks) if len(masks) > 1 else next(iter(masks.values()))


def _additive(mask_B1QT: Tensor, dtype: torch.dtype) -> Tensor:
    zeros_B1QT = torch.zeros(mask_B1QT.shape, dtype=dtype, device=mask_B1QT.device)
    return zeros_B1QT.masked_fill_(~mask_B1QT, torch.finfo(dtype).min)
