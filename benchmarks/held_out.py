"""Losses of a trained model on rows that it has not seen, by our own code path and by a plain causal forward.

Shapes: L positions, V vocabulary.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from pipelines.quickstart_task import PHRASE_PATTERNS, PHRASE_REQUEST, parse_prompt
from workers.chat import Conversation, encode_pair, fit_to_length
from workers.models.folder import load_tokenizer, read_multi_token_settings
from workers.models.loading import inspect_model_folder, load_causal_lm
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample


@dataclass(frozen=True)
class HeldOutLosses:
    """Nats per response token. `one_token` by a plain causal forward; `mask` over random cuts, None for an AR model."""

    one_token: float
    mask: float | None


def quickstart_pairs(heldout: Path, seed: int) -> list[tuple[str, str]]:
    """Prompts of the held-out shards, each with a valid answer whose free choice is drawn by `seed`."""
    rng = random.Random(f"held-out answers {seed}")
    messages = [
        row for path in sorted(heldout.glob("*.parquet")) for row in pq.read_table(path)["messages"].to_pylist()
    ]
    prompts = [turns[-1]["content"] for turns in messages]
    return [(prompt, parse_prompt(prompt).answer(rng.choice(PHRASE_PATTERNS))) for prompt in prompts]


def quickstart_floor(pairs: Sequence[tuple[str, str]], samples: Sequence[Sample]) -> float:
    """The least one-token loss that any model can have: the free choice among equally frequent phrases, spread over all tokens."""
    num_choices = sum(prompt.endswith(PHRASE_REQUEST) for prompt, _ in pairs)
    num_tokens = sum(end - start for sample in samples for start, end in sample.responses)
    return num_choices * math.log(len(PHRASE_PATTERNS)) / num_tokens


def jsonl_pairs(path: Path, prompt_column: str, response_column: str) -> list[tuple[str, str]]:
    """Prompt and response of each line."""
    with path.open(encoding="utf-8") as lines:
        return [(row[prompt_column], row[response_column]) for row in map(json.loads, lines)]


def encode(model_folder: str, pairs: Sequence[tuple[str, str]], max_length: int) -> list[Sample]:
    """The samples that training would make of these pairs; the tokenizer and the end ids are the model's."""
    tokenizer, end_ids = load_tokenizer(model_folder), inspect_model_folder(model_folder).end_ids

    def conversations() -> Iterator[Conversation]:
        for prompt, response in pairs:
            whole = encode_pair(tokenizer, prompt, response, prompt_format="chat", end_ids=end_ids)
            yield fit_to_length(whole, max_length, "truncate")

    return [
        Sample(0, row, 0, np.array(each.token_ids, dtype=np.int32), tuple(each.responses))
        for row, each in enumerate(conversations())
    ]


@torch.no_grad()
def plain_one_token_loss(model: torch.nn.Module, samples: Sequence[Sample]) -> float:
    """Mean negative log-likelihood of the response tokens, one unmodified causal forward for each sample."""
    total, count = 0.0, 0
    for sample in samples:
        token_ids_L = torch.from_numpy(sample.token_ids.astype(np.int64))
        log_probabilities_LV = model(token_ids_L[None], use_cache=False).logits[0].float().log_softmax(-1)
        for start, end in sample.responses:
            targets = torch.arange(max(start, 1), end)
            total -= float(log_probabilities_LV[targets - 1, token_ids_L[targets]].sum())
            count += len(targets)
    return total / count


@torch.no_grad()
def mask_loss(model: torch.nn.Module, samples: Sequence[Sample], objective: MarsObjective) -> float:
    """Mean loss of the response tokens by the blocks of `objective`."""
    module = LossModule(model, objective)
    total, count = 0.0, 0
    for batch in objective.pack(samples, row_tokens=512, micro_batch_rows=1):
        total += float(module(batch, module.num_chunks_of(batch)).mask_sum)
        count += batch.num_response_tokens
    return total / count


def held_out_losses(model_folder: str, samples: Sequence[Sample]) -> HeldOutLosses:
    """Both losses of the model in a folder that a training stage has published."""
    model = load_causal_lm(model_folder, dtype=torch.float32)
    settings = read_multi_token_settings(model_folder)
    mask = None
    if settings is not None and settings.block_size > 1:
        objective = MarsObjective(settings.block_size, 0.0, 1.0, True, settings.mask_token_id, seed=0)
        mask = mask_loss(model, samples, objective)
    return HeldOutLosses(plain_one_token_loss(model, samples), mask)
