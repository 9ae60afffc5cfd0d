"""Who sees whom: one elementwise rule over the places of tokens, and the attention masks made from it.

Shapes: B rows, L positions of a row (queries and keys alike).
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import InputError
from workers.objectives.streams import Places

FULL = "full_attention"
SLIDING = "sliding_attention"
AttentionMask = Tensor | dict[str, Tensor]


def is_visible(query: Places, key: Places, sliding_window: int | None = None) -> Tensor:
    """Whether each query sees each key; elementwise with broadcasting, so it can also serve as a FlexAttention mask.

    A key of the same document is seen when it is clean and not beyond the query's clean limit, or when it stands in
    the query's own noisy block, at or before the query. With `sliding_window`, positions further back than that are
    hidden; the window counts position ids, as a placeholder has the position of the token it stands for.
    """
    in_clean_context = (key.block == 0) & (key.position <= query.clean_limit)
    in_own_block = (key.block == query.block) & (query.block != 0) & (key.position <= query.position)
    visible = (key.document == query.document) & (in_clean_context | in_own_block)
    if sliding_window is not None:
        visible = visible & (query.position - key.position < sliding_window)
    return visible


def dense_visibility(places: Places, sliding_window: int | None = None) -> Tensor:
    """The rule for all pairs of a row, boolean (B, 1, L, L)."""
    query = Places(*(vector_BL[:, None, :, None] for vector_BL in places))
    key = Places(*(vector_BL[:, None, None, :] for vector_BL in places))
    return is_visible(query, key, sliding_window)


def build_attention_mask(model: PreTrainedModel, places: Places) -> AttentionMask:
    """The mask in the form that `model` takes: one (B, 1, L, L) tensor, or one for each layer type when they differ.

    `sdpa` takes booleans; `eager` adds the mask to the scores, so it gets 0 and the lowest number of the dtype.

    Raises:
        InputError: the model has layers that are neither full nor sliding-window attention, or another attention
            implementation.
    """
    windows = attention_windows(model.config)
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise InputError("attention", implementation, "sdpa or eager", "Other kernels take no mask of their own.")
    masks: dict[str, Tensor] = {}
    for layer_type, window in windows.items():
        mask_BxLL = dense_visibility(places, window)
        if implementation == "eager":
            mask_BxLL = torch.zeros(mask_BxLL.shape, dtype=model.dtype, device=mask_BxLL.device).masked_fill_(
                ~mask_BxLL, torch.finfo(model.dtype).min
            )
        masks[layer_type] = mask_BxLL
    return masks if len(masks) > 1 else next(iter(masks.values()))


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
    assert window is not None or SLIDING not in layer_types
    return {layer_type: window if layer_type == SLIDING else None for layer_type in sorted(set(layer_types))}
