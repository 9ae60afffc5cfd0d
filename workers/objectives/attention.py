"""Who sees whom: one elementwise rule over the places of tokens, and the attention masks made from it.

Shapes: B rows, L positions of a row (queries and keys alike).
"""

from torch import Tensor
from transformers import PreTrainedModel

from workers.models.attention_masks import AttentionMask, attention_windows, pack_masks, takes_additive_masks
from workers.objectives.streams import Places


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

    Raises:
        InputError: the model has layers that are neither full nor sliding-window attention, or another attention
            implementation.
    """
    windows = attention_windows(model.config)
    return pack_masks(
        {layer_type: dense_visibility(places, window) for layer_type, window in windows.items()},
        is_additive=takes_additive_masks(model.config),
        dtype=model.dtype,
    )
