"""One run of the model over packed rows, up to the hidden states that its head takes.

Shapes: B rows, L positions, D model width.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.models.attention_masks import takes_block_masks
from workers.models.loading import backbone_and_head
from workers.objectives.attention import build_attention_mask
from workers.objectives.block_mask import BLOCK
from workers.objectives.streams import PADDING, PackedBatch, Places


def hidden_states(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """The final hidden states of both streams, (B, L, D).

    For FlexAttention rows are lengthened to whole blocks: its kernels are compiled for few lengths then, and never the one
    for decoding, which it picks for queries shorter than a block.
    """
    length = batch.token_ids_BL.shape[1]
    num_more = -length % BLOCK if takes_block_masks(model.config) else 0
    hidden_BLD: Tensor = (
        backbone_and_head(model)
        .backbone(
            input_ids=nn.functional.pad(batch.token_ids_BL, (0, num_more)),
            attention_mask=build_attention_mask(model, _lengthened(batch.places(), num_more)),
            position_ids=nn.functional.pad(batch.position_ids_BL, (0, num_more)),
            use_cache=False,
        )
        .last_hidden_state
    )
    return hidden_BLD[:, :length]


def _lengthened(places: Places, num_more: int) -> Places:
    """The places with `num_more` padding tokens behind each row, each of which sees itself only."""
    document, block, position, clean_limit = (
        nn.functional.pad(vector_BL, (0, num_more), value=PADDING) for vector_BL in places
    )
    length = block.shape[1]
    block[:, length - num_more :] = PADDING - torch.arange(length - num_more, length, device=block.device)
    return Places(document, block, position, clean_limit)
