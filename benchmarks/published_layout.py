"""The training layout of the published MARS code, written plainly: the baseline that our packed layout is compared with.

`[clean | noisy]` is the whole sequence twice, prompt included. In the noisy copy every response token is a placeholder, so a
block of B tokens has B of them, although the last one predicts nothing that is counted. The attention mask is dense; logits are
computed at every position of both copies; samples are sorted by length and padded, not packed.

Two things are as in the paper and not as in its code (github.com/Xalp/MARS), so that both layouts have the same loss: blocks are
cut from the beginning of the response instead of from the beginning of the prompt, and the first token of a block is predicted
from the clean token before it instead of from the last placeholder of the block before. Neither changes what a step costs.
Filling the last block up with end tokens is left out, which spares the baseline some positions.

Shapes: S samples, L positions of one copy, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.objectives.streams import Sample


class PublishedBatch(NamedTuple):
    """A padded micro-batch. `response_SL` marks response tokens, `first_SL` those that begin a block."""

    token_ids_SL: Tensor
    response_SL: Tensor
    first_SL: Tensor
    block_SL: Tensor


class LayoutSums(NamedTuple):
    """Sums over the response tokens of a micro-batch."""

    ar_sum: Tensor
    mask_sum: Tensor


def sorted_batches(samples: Sequence[Sample], num_rows: int) -> list[list[Sample]]:
    """Micro-batches of similar lengths, the longest first."""
    by_length = sorted(samples, key=lambda sample: -len(sample.token_ids))
    return [by_length[start : start + num_rows] for start in range(0, len(by_length), num_rows)]


def collate(samples: Sequence[Sample], block_size: int) -> PublishedBatch:
    """Pads samples of one response each on the right."""
    length = max(len(sample.token_ids) for sample in samples)
    token_ids_SL = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, sample in enumerate(samples):
        token_ids_SL[row, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids)
    spans = [sample.responses for sample in samples]
    assert all(len(span) == 1 and span[0][0] > 0 for span in spans), "one response behind a prompt"
    start_S1, end_S1 = torch.tensor([span[0] for span in spans]).T[:, :, None]
    position_L = torch.arange(length)
    in_response_SL = position_L - start_S1
    response_SL = (in_response_SL >= 0) & (position_L < end_S1)
    first_SL = response_SL & (in_response_SL % block_size == 0)
    return PublishedBatch(token_ids_SL, response_SL, first_SL, in_response_SL // block_size)


def attention_mask(block_SL: Tensor) -> Tensor:
    """Who sees whom in `[clean | noisy]`, boolean (S, 1, 2L, 2L); built once for all layers."""
    num_samples, length = block_SL.shape
    causal_LL = torch.ones(length, length, dtype=torch.bool).tril()
    query_SL1, key_S1L = block_SL[:, :, None], block_SL[:, None, :]
    mask = torch.zeros(num_samples, 1, 2 * length, 2 * length, dtype=torch.bool)
    mask[:, 0, :length, :length] = causal_LL
    mask[:, 0, length:, :length] = key_S1L < query_SL1
    mask[:, 0, length:, length:] = (key_S1L == query_SL1) & causal_LL
    return mask


def loss_sums(model: PreTrainedModel, batch: PublishedBatch, mask_token_id: int) -> LayoutSums:
    """Both losses of a micro-batch, with gradients."""
    token_ids_SL, response_SL, first_SL, block_SL = batch
    length = token_ids_SL.shape[1]
    noisy_ids_SL = torch.where(response_SL, mask_token_id, token_ids_SL)
    positions_SL = torch.arange(length).expand_as(token_ids_SL)
    logits_SLV = model(
        input_ids=torch.cat([token_ids_SL, noisy_ids_SL], dim=1),
        attention_mask=attention_mask(block_SL),
        position_ids=torch.cat([positions_SL, positions_SL], dim=1),
        use_cache=False,
    ).logits
    is_target = response_SL[:, 1:]  # the logits of a position predict the next one
    labels = token_ids_SL[:, 1:][is_target]
    clean_losses = _losses(logits_SLV[:, : length - 1], is_target, labels)
    noisy_losses = _losses(logits_SLV[:, length:-1], is_target, labels)
    mask_losses = torch.where(first_SL[:, 1:][is_target], clean_losses, noisy_losses)
    return LayoutSums(clean_losses.sum(), mask_losses.sum())


def _losses(logits_SLV: Tensor, is_target_SL: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_SLV[is_target_SL].float(), labels, reduction="none")
