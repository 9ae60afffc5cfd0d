"""The oracle: plain causal `[clean prefix | n-1 masks]` through the unmodified model gives the logits of each block."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import MASK_ID, MODEL_TYPES, VOCAB_SIZE, random_samples, tiny_model
from transformers import PreTrainedModel

from workers.errors import InputError
from workers.models.loading import backbone_and_head
from workers.objectives.backbone import hidden_states
from workers.objectives.mars import MarsObjective
from workers.objectives.probe import check_two_streams
from workers.objectives.streams import PackedBatch, Sample, response_phases


def naive_blocks(sample: Sample, objective: MarsObjective) -> list[tuple[int, int]]:
    """Half-open spans of the blocks of all responses, one token at a time."""
    blocks = []
    for index, (start, end) in enumerate(sample.responses):
        offset = 0
        if objective.random_block_phase:
            offset = int(response_phases(objective.seed, sample, objective.block_size)[index])
        begin = start
        for token in range(start + 1, end):
            starts_block = token - start >= offset and (token - start - offset) % objective.block_size == 0
            if starts_block:
                blocks.append((begin, token))
                begin = token
        blocks.append((begin, end))
    return blocks


@torch.no_grad()
def reference_logits(model: PreTrainedModel, sample: Sample, objective: MarsObjective) -> dict[tuple[int, int], object]:
    """(first token of the block, position that predicts) -> logits (V,), from plain causal runs of each block."""
    logits = {}
    for begin, end in naive_blocks(sample, objective):
        masks = np.full(end - begin - 1, MASK_ID)
        token_ids = np.concatenate([sample.token_ids[:begin], masks])
        plain_LV = model(torch.tensor(token_ids)[None].long(), use_cache=False).logits[0]
        for position in range(begin - 1, end - 1):
            logits[begin, position] = plain_LV[position]
    return logits


@torch.no_grad()
def two_stream_logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    _, head, transform = backbone_and_head(model)
    return transform(head(hidden_states(model, batch).flatten(0, 1)[batch.source_N]))


def sample_of(batch: PackedBatch, row: int, document: int, samples: list[Sample]) -> Sample:
    is_clean_L = (batch.document_BL[row] == document) & (batch.block_BL[row] == 0)
    token_ids = batch.token_ids_BL[row][is_clean_L].tolist()
    found = [sample for sample in samples if sample.token_ids.tolist() == token_ids]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("row_tokens", [1, 120], ids=["unpacked", "packed"])
@pytest.mark.parametrize(("block_size", "random_phase"), [(2, True), (4, False), (4, True), (8, True)])
def test_every_block_equals_the_plain_causal_model(
    model_type: str, row_tokens: int, block_size: int, random_phase: bool
) -> None:
    model = tiny_model(model_type)
    objective = MarsObjective(block_size, 1.0, 1.0, random_phase, MASK_ID, seed=3)
    samples = random_samples(5, seed=block_size, num_turns=3)
    window = getattr(model.config, "sliding_window", None)
    assert window is None or max(len(sample.token_ids) for sample in samples) > 4 * window
    batches = objective.pack(samples, row_tokens=row_tokens, micro_batch_rows=3)
    assert any(batch.num_padding for batch in batches)
    if row_tokens > 1:
        assert any(int(batch.document_BL.max()) > 0 for batch in batches)

    references = {sample.row: reference_logits(model, sample, objective) for sample in samples}
    in_mask_loss, in_ar_loss = set(), set()
    for batch in batches:
        logits_NV = two_stream_logits(model, batch)
        assert bool(torch.isfinite(logits_NV).all())
        length = batch.token_ids_BL.shape[1]
        for index, source in enumerate(batch.source_N.tolist()):
            row, column = divmod(source, length)
            sample = sample_of(batch, row, int(batch.document_BL[row, column]), samples)
            position = int(batch.position_ids_BL[row, column])
            assert batch.label_N[index] == sample.token_ids[position + 1]
            if batch.in_ar_loss_N[index]:
                in_ar_loss.add((sample.row, position))
                plain_LV = model(torch.tensor(sample.token_ids)[None].long(), use_cache=False).logits[0]
                torch.testing.assert_close(logits_NV[index], plain_LV[position], atol=1e-4, rtol=0)
            if batch.in_mask_loss_N[index]:
                begin = int(batch.clean_limit_BL[row, column]) + 1
                in_mask_loss.add((sample.row, begin, position))
                expected_V = references[sample.row][begin, position]
                torch.testing.assert_close(logits_NV[index], expected_V, atol=1e-4, rtol=0)
    assert in_mask_loss == {(row, *key) for row, logits in references.items() for key in logits}
    assert in_ar_loss == {(s.row, t - 1) for s in samples for start, end in s.responses for t in range(start, end)}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gemma3_text"])
def test_eager_attention_gives_the_same_logits(model_type: str) -> None:
    """A boolean mask handed to eager attention is added to the scores as 0 and 1: it would silently mask nothing."""
    model = tiny_model(model_type)
    objective = MarsObjective(4, 1.0, 1.0, True, MASK_ID, seed=0)
    (batch,) = objective.pack(random_samples(4), row_tokens=100, micro_batch_rows=4)
    sdpa_NV = two_stream_logits(model, batch)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(two_stream_logits(model, batch), sdpa_NV, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_what_a_prediction_may_not_see_changes_nothing(model_type: str) -> None:
    """Perturb every token of the row in turn: only the predictions that may see it move, and those do move."""
    model = tiny_model(model_type)
    objective = MarsObjective(3, 1.0, 1.0, True, MASK_ID, seed=1)
    (batch,) = objective.pack(random_samples(2, seed=5, num_turns=2), row_tokens=200, micro_batch_rows=1)
    base_NV = two_stream_logits(model, batch)
    document, block = batch.document_BL[0].tolist(), batch.block_BL[0].tolist()
    position, limit = batch.position_ids_BL[0].tolist(), batch.clean_limit_BL[0].tolist()
    num_moved = 0
    for changed in range(batch.token_ids_BL.shape[1]):
        token_ids_BL = batch.token_ids_BL.clone()
        token_ids_BL[0, changed] = (token_ids_BL[0, changed] + 1) % VOCAB_SIZE
        changed_NV = two_stream_logits(model, dataclasses.replace(batch, token_ids_BL=token_ids_BL))
        moved_N = (changed_NV - base_NV).abs().amax(-1) > 0
        for index, source in enumerate(batch.source_N.tolist()):
            may_see = document[source] == document[changed] and (
                (block[changed] == 0 and position[changed] <= limit[source])
                or (block[source] > 0 and block[changed] == block[source] and position[changed] <= position[source])
            )
            if not may_see:
                assert not moved_N[index]
            num_moved += int(moved_N[index])
    assert num_moved > 100


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_accepts_models_that_follow_masks_and_positions(model_type: str, dtype: torch.dtype) -> None:
    check_two_streams(tiny_model(model_type).to(dtype))


@pytest.mark.parametrize("fault", ["mask", "position", "head"])
def test_probe_refuses_models_that_ignore_what_they_are_given(fault: str) -> None:
    model = tiny_model("llama")
    backbone = model.base_model
    plain_forward = backbone.forward

    def forward(**inputs: object) -> object:
        if fault == "mask":
            inputs["attention_mask"] = None
        if fault == "position":
            inputs["position_ids"] = None
        return plain_forward(**inputs)

    if fault == "head":
        model.config.logits_scaling = 2.0  # Llama does not divide by it
    else:
        backbone.forward = forward
    with pytest.raises(InputError, match="llama"):
        check_two_streams(model)
