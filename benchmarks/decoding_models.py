"""Models for the decoding benchmarks: the shape of SmolLM2-135M, a tiny one that is trained on the spot, and model folders.

With random weights a draft is accepted by chance only, so such a model shows what a step costs and nothing about windows. The
tiny model learns a task in seconds in which some tokens follow from what stands before them and some are a free choice: its
drafts are accepted often and rejected often.

Free of Ray and DeepSpeed, as all modules of these benchmarks that `device_check.py` uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from workers.models.folder import inspect_model_folder, load_tokenizer, read_multi_token_settings
from workers.models.loading import init_mask_embedding, load_causal_lm
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample

BLOCK_SIZE = 8
SMOLLM2_VOCABULARY, SMOLLM2_LAYERS = 49152, 30
# The walk: tokens 8..39 are its places in order; behind each eighth place stands 50 or 51, a free choice: 51 skips four places.
WALK_VOCABULARY, WALK_PLACES, FIRST_PLACE, FIRST_CHOICE, STRIDE_TO_CHOICE, SKIPPED = 64, 32, 8, 50, 8, 4
WALK_SAMPLES_PER_STEP, WALK_LEARNING_RATE = 16, 3e-3
LONGEST_WALK = 1024


class NoText:
    """Stands for a tokenizer where answers are token ids only."""

    def decode(self, token_ids: Sequence[int], **_options: Any) -> str:
        """No text."""
        return ""


@dataclass(frozen=True)
class Subject:
    """A model to decode with.

    Attributes:
        end_ids: tokens that end an answer; empty where only budgets do.
        is_trained: whether placeholders mean something to it, so that ratios of windows do.
        is_walk: whether its prompts must be walks.
        prompts: prompts from a file; empty means drawn ones with the lengths of GSM8K.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    mask_token_id: int
    end_ids: frozenset[int]
    block_size: int
    is_trained: bool
    is_walk: bool = False
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device


def random_smollm2(num_layers: int, device: torch.device, dtype: torch.dtype) -> Subject:
    """The shape of SmolLM2-135M with random weights, or with fewer of its layers; the last id is the placeholder."""
    config = LlamaConfig(
        vocab_size=SMOLLM2_VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    mask_token_id = SMOLLM2_VOCABULARY - 1
    # The mean row: never the likeliest token, which the engine would leave out and `generate` would not.
    init_mask_embedding(model, mask_token_id)
    name = f"SmolLM2-135M shape, {num_layers} layers, random weights"
    return Subject(name, prepare(model, device, dtype), NoText(), mask_token_id, frozenset(), BLOCK_SIZE, False)


def trained_walker(
    num_steps: int, device: torch.device, dtype: torch.dtype, *, width: int = 64, num_layers: int = 2
) -> Subject:
    """A tiny Llama trained on walks with the MARS objective, on the CPU in float32 and then moved."""
    config = LlamaConfig(
        vocab_size=WALK_VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=LONGEST_WALK,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    mask_token_id = WALK_VOCABULARY - 1
    objective = MarsObjective(BLOCK_SIZE, 1.0, 1.0, True, mask_token_id, seed=0)
    module = LossModule(model, objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WALK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, WALK_LEARNING_RATE, total_steps=num_steps)
    generator = np.random.default_rng(0)
    for _ in range(num_steps):
        samples = [_walk_sample(generator, row) for row in range(WALK_SAMPLES_PER_STEP)]
        batches = objective.pack(samples, row_tokens=256, micro_batch_rows=8)
        count = sum(batch.num_response_tokens for batch in batches)
        for batch in batches:
            (module(batch, module.num_chunks_of(batch)).loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    name = f"Llama of width {width}, {num_layers} layers, trained for {num_steps} steps"
    ready = prepare(model, device, dtype)
    return Subject(name, ready, NoText(), mask_token_id, frozenset(), BLOCK_SIZE, True, is_walk=True)


def load_subject(folder: str, prompts: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> Subject:
    """A model folder with `marsray.json`, as training writes it."""
    settings = read_multi_token_settings(folder)
    if settings is None:
        raise SystemExit(f"error: {folder} has no marsray.json; expected a model that was trained with placeholders")
    return Subject(
        name=folder,
        model=prepare(load_causal_lm(folder, dtype=dtype), device, dtype),
        tokenizer=load_tokenizer(folder),
        mask_token_id=settings.mask_token_id,
        end_ids=inspect_model_folder(folder).end_ids,
        block_size=settings.block_size,
        is_trained=True,
        prompts=tuple(prompts),
    )


def walk(generator: np.random.Generator, length: int) -> list[int]:
    """Tokens of a walk that begins anywhere; its choices are drawn."""
    tokens: list[int] = []
    place = int(generator.integers(0, WALK_PLACES))
    while len(tokens) < length:
        tokens.append(FIRST_PLACE + place)
        choice = 0
        if place % STRIDE_TO_CHOICE == STRIDE_TO_CHOICE - 1:
            choice = int(generator.integers(0, 2))
            tokens.append(FIRST_CHOICE + choice)
        place = (place + 1 + SKIPPED * choice) % WALK_PLACES
    return tokens[:length]


def _walk_sample(generator: np.random.Generator, row: int) -> Sample:
    num_prompt, num_response = int(generator.integers(3, 30)), int(generator.integers(12, 40))
    token_ids = np.array(walk(generator, num_prompt + num_response), dtype=np.int32)
    return Sample(0, row, 0, token_ids, ((num_prompt, len(token_ids)),))


def prepare(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """On its device, for decoding, and without end tokens of its own: each run names those that it wants."""
    ready: PreTrainedModel = model.to(device=device, dtype=dtype).eval()
    ready.requires_grad_(False)
    ready.generation_config = GenerationConfig()
    return ready
