"""A model trained with one block size, decoded with other windows: the reason for the random block phase."""

import numpy as np
import pytest
import torch
from scripted_model import ByteTokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample

MODULUS, END_ID, MASK_ID, VOCAB_SIZE = 12, 16, 17, 18
BLOCK_SIZE, NUM_STEPS, SAMPLES_PER_STEP = 8, 200, 32
TASKS = [(start, step) for start in range(MODULUS) for step in (1, 2, 3)]


def counting(start: int, step: int) -> tuple[list[int], list[int]]:
    """Prompt: where to start, and by how much to count. Answer: sixteen numbers and the end token."""
    return [start, MODULUS - 1 + step], [(start + step * index) % MODULUS for index in range(1, 17)] + [END_ID]


def train(*, random_block_phase: bool) -> PreTrainedModel:
    """A tiny Llama that has learned to count with the MARS loss, in plain torch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    objective = MarsObjective(
        block_size=BLOCK_SIZE,
        ar_weight=1.0,
        mask_weight=1.0,
        random_block_phase=random_block_phase,
        mask_token_id=MASK_ID,
        seed=0,
    )
    module = LossModule(LlamaForCausalLM(config), objective, head_chunk=4096)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 20) * max(0.05, 1 - step / NUM_STEPS)
    )
    generator = np.random.default_rng(0)
    for step in range(NUM_STEPS):
        samples = []
        for place in range(SAMPLES_PER_STEP):
            prompt, answer = counting(*TASKS[generator.integers(len(TASKS))])
            token_ids = np.array(prompt + answer, dtype=np.int32)
            samples.append(
                Sample(
                    file=0,
                    row=SAMPLES_PER_STEP * step + place,
                    epoch=0,
                    token_ids=token_ids,
                    responses=((len(prompt), len(token_ids)),),
                )
            )
        (batch,) = objective.pack(samples, row_tokens=1, micro_batch_rows=SAMPLES_PER_STEP)
        loss = module(batch, num_chunks=1).loss / batch.num_response_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return module.model.eval()


def decode(model: PreTrainedModel, window: int) -> tuple[float, float]:
    """Share of right answers, and tokens per forward, at tau 0.95."""
    engine = DecodingEngine(
        model,
        ByteTokenizer(),
        mask_token_id=MASK_ID,
        end_ids={END_ID},
        block_size=BLOCK_SIZE,
        num_slots=len(TASKS),
        max_length=None,
        cache="ragged",
    )
    options = RowDecodingSettings(threshold=0.95, window=window, max_new_tokens=20)
    prompts, answers = zip(*(counting(*task) for task in TASKS), strict=True)
    results = engine.generate_all([Request(place, tuple(prompt), options) for place, prompt in enumerate(prompts)])
    num_right = sum(list(result.token_ids) == answer for result, answer in zip(results, answers, strict=True))
    return num_right / len(TASKS), engine.statistics.tokens_per_forward


@pytest.mark.parametrize("random_block_phase", [True, False], ids=["random", "fixed"])
def test_windows_other_than_the_block_size(random_block_phase):
    """Case 13: trained with blocks of 8. With random cuts accuracy stands at every window, and wider windows are faster; with
    the paper's fixed cuts, where a placeholder has only been seen at its own place in the answer, it collapses."""
    model = train(random_block_phase=random_block_phase)
    assert decode(model, 1)[0] == 1.0
    accuracies, rates = zip(*(decode(model, window) for window in (3, 4, 5, 8)), strict=True)
    if random_block_phase:
        assert min(accuracies) >= 0.95
        assert rates[0] > 2 and rates[1] > 2.5 and rates[-1] > 4
    else:
        assert max(accuracies[:3]) < 0.7
