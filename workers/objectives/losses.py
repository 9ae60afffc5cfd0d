"""From packed batches to sums of cross-entropies: the model, its head on supervised positions only, in chunks.

Shapes: B rows, L positions, N supervised positions, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from workers.models.loading import backbone_and_head
from workers.objectives.backbone import hidden_states
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import PackedBatch

LOGITS_IN_MEMORY = 1 << 26  # 256 MiB in float32, whatever the vocabulary and the length


class LossSums(NamedTuple):
    """Sums over the supervised tokens of one micro-batch, float32 scalars; only `loss` carries gradients."""

    loss: Tensor
    ar_sum: Tensor
    mask_sum: Tensor


class LossModule(nn.Module):
    """A causal language model together with its training loss, to be wrapped by a training engine as one module.

    Args:
        model: the model; its parameters appear as `model.*` in the state dict of this module.
        objective: gives the weights of the two losses.
        head_chunk: supervised positions whose logits are held in memory at once; None: as many as `LOGITS_IN_MEMORY` hold.
    """

    def __init__(self, model: PreTrainedModel, objective: MarsObjective, head_chunk: int | None = None) -> None:
        super().__init__()
        assert head_chunk is None or head_chunk >= 1
        self.model = model
        self.objective = objective
        vocab_size = model.config.get_text_config().vocab_size
        self.head_chunk = head_chunk or max(1, LOGITS_IN_MEMORY // vocab_size)

    def num_chunks_of(self, batch: PackedBatch) -> int:
        """The fewest chunks that keep each within `head_chunk` positions; 1 for a batch without predictions."""
        return max(1, -(-len(batch.source_N) // self.head_chunk))

    def forward(self, batch: PackedBatch, num_chunks: int) -> LossSums:
        """Sums, not means, of the batch on the model's device.

        `num_chunks` is the largest `num_chunks_of` of all ranks: with parameters spread over ranks (ZeRO-3) each call
        of the head is a collective operation. A batch without predictions has loss 0, and gradients of 0 everywhere.
        """
        assert num_chunks >= self.num_chunks_of(batch)
        _, head, transform = backbone_and_head(self.model)
        weight_N2 = torch.stack([batch.in_ar_loss_N, batch.in_mask_loss_N], dim=1).float()
        hidden_TD = hidden_states(self.model, batch).flatten(0, 1)
        sums = chunked_cross_entropy(
            head, transform, hidden_TD, batch.source_N, batch.label_N, weight_N2, num_chunks=num_chunks
        )
        ar_sum, mask_sum = sums.unbind()
        loss = self.objective.ar_weight * ar_sum + self.objective.mask_weight * mask_sum
        return LossSums(loss, ar_sum.detach(), mask_sum.detach())


def chunked_cross_entropy(
    head: nn.Module,
    transform: Callable[[Tensor], Tensor],
    hidden_TD: Tensor,
    source_N: Tensor,
    label_N: Tensor,
    weight_N2: Tensor,
    *,
    num_chunks: int,
) -> Tensor:
    """Weighted sums (2,) of the float32 cross-entropies of N predictions, the head run in exactly `num_chunks` calls.

    Logits are computed again in the backward pass instead of being kept, but for the last chunk: the backward pass begins
    with it, so there is nothing to save. Chunks are filled up with predictions of weight 0 from the first hidden state of
    the T = B*L.
    """
    chunk_size = max(1, -(-len(source_N) // num_chunks))
    num_filling = chunk_size * num_chunks - len(source_N)
    source_N = nn.functional.pad(source_N, (0, num_filling))
    label_N = nn.functional.pad(label_N, (0, num_filling))
    weight_N2 = nn.functional.pad(weight_N2, (0, 0, 0, num_filling))

    def chunk_sums(hidden_ND: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits_NV = transform(head(hidden_ND)).float()
        losses_N = nn.functional.cross_entropy(logits_NV, labels, reduction="none")
        return (losses_N[:, None] * weights).sum(dim=0)  # no matmul: autocast and TF32 would round it

    sums = torch.zeros(2, dtype=torch.float32, device=hidden_TD.device)
    for number in range(num_chunks):
        chunk = slice(number * chunk_size, (number + 1) * chunk_size)
        arguments = (hidden_TD[source_N[chunk]], label_N[chunk], weight_N2[chunk])
        if number == num_chunks - 1:
            sums = sums + chunk_sums(*arguments)
        else:
            sums = sums + checkpoint(chunk_sums, *arguments, use_reentrant=False, preserve_rng_state=False)
    return sums
