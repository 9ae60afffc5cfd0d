"""Who sees whom: one elementwise rule over the places of tokens, from which every kind of attention mask is made."""

from torch import Tensor

from workers.objectives.streams import Places


def is_visible(query: Places, key: Places, sliding_window: int | None = None) -> Tensor:
    """Whether each query sees each key; elementwise with broadcasting, so it also serves as a FlexAttention mask.

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
