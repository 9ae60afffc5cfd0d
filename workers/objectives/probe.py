"""Whether a model honours attention masks and position ids of ours: a small two-stream run against a plain causal one.

Shapes: B rows, L positions, N predictions, V vocabulary.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from workers.errors import InputError
from workers.models.loading import backbone_and_head
from workers.objectives.backbone import hidden_states
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample

MASK_ID, PREFIX, BLOCK_SIZE = 0, 5, 4
# Mean difference as a share of the spread of the logits: rounding stays far below, a wrong mask is near 1.
FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1


@torch.no_grad()
def check_two_streams(model: PreTrainedModel) -> None:
    """Compare the logits of two blocks with the plain model's, in evaluation mode on the model's device.

    To be called before the parameters are spread over ranks.

    Raises:
        InputError: they differ. The model ignores position ids or masks, or treats its hidden states in a way that
            `backbone_and_head` does not know.
    """
    token_ids = np.arange(1, PREFIX + 2 * BLOCK_SIZE + 1, dtype=np.int32)
    sample = Sample(file=0, row=0, epoch=0, token_ids=token_ids, responses=((PREFIX, len(token_ids)),))
    objective = MarsObjective(BLOCK_SIZE, 0.0, 1.0, False, MASK_ID, seed=0)
    (batch,) = objective.pack([sample], row_tokens=1, micro_batch_rows=1)
    batch = batch.to(model.device)
    was_training = model.training
    model.eval()
    _, head, transform = backbone_and_head(model)
    two_stream_NV = transform(head(hidden_states(model, batch).flatten(0, 1)[batch.source_N])).float()

    plain_NV = torch.empty_like(two_stream_NV)
    begin_N = batch.clean_limit_BL[0, batch.source_N] + 1
    for begin in (PREFIX, PREFIX + BLOCK_SIZE):
        plain_ids_L = torch.tensor([*token_ids[:begin], *[MASK_ID] * (BLOCK_SIZE - 1)], device=model.device)
        logits_LV = model(plain_ids_L[None].long(), use_cache=False).logits[0].float()
        is_here_N = begin_N == begin
        plain_NV[is_here_N] = logits_LV[batch.position_ids_BL[0, batch.source_N[is_here_N]]]
    model.train(was_training)

    difference = float((two_stream_NV - plain_NV).abs().mean() / plain_NV.std())
    if not difference <= (FLOAT32_TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE):
        raise InputError(
            f"model type {model.config.model_type}",
            f"logits that differ by {difference:.2g} of their spread from those of a plain causal run",
            "a model that follows attention masks and position ids",
            "Models with positions or masks of their own cannot be trained on two streams.",
        )
