"""From raw rows to what a model is trained on: pad tokens in texts, padding, one BOS, answers of a single end token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_tokenizers import BOS_ID, END_ID, MASK_ID, byte_tokenizer
from prepared_shards import ENDS, prepare_here, turns, write_lines
from tiny_models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from pipelines.row_requests import RequestBuilder
from pipelines.work_units import PromptRow
from workers.config import PromptSettings, RowDecodingSettings
from workers.decoding.request import Request
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import PackedBatch, Sample

OBJECTIVE = MarsObjective(
    block_size=4, ar_weight=1.0, mask_weight=1.0, random_block_phase=True, mask_token_id=MASK_ID, seed=0
)
ROW_TOKENS = 50  # one of the two samples fills a row, the other one is padded


@pytest.fixture(scope="module")
def module() -> LossModule:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 300, "max_position_embeddings": 256})).eval()
    return LossModule(model, OBJECTIVE, None)


def samples_of(folder: Path, tokenizer: Any, rows: list[dict[str, Any]], **options: Any) -> list[Sample]:
    tokenizer.save_pretrained(folder / "tokenizer")
    write_lines(folder / "in" / "a.jsonl", rows)
    prepared, rejected = prepare_here(folder, str(folder / "tokenizer"), **options)
    assert not rejected
    return [
        Sample(
            file=row["file"],
            row=row["row"],
            epoch=0,
            token_ids=np.array(row["token_ids"], np.int32),
            responses=tuple(zip(row["starts"], row["ends"], strict=True)),
        )
        for row in prepared
    ]


def pack(samples: list[Sample]) -> PackedBatch:
    (batch,) = OBJECTIVE.pack(samples, row_tokens=ROW_TOKENS, micro_batch_rows=8)
    return batch


def losses(module: LossModule, batch: PackedBatch) -> tuple[float, float]:
    with torch.no_grad():
        sums = module(batch, 1)
    return float(sums.ar_sum), float(sums.mask_sum)


PAD_TEXT = "what does <|end|> mean?"


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """Pad is the end-of-turn token; one prompt spells it out; three assistant turns in all."""
    two_turns = {"messages": [*turns(PAD_TEXT, "an end")["messages"], *turns("ok", "yes")["messages"]]}
    return samples_of(tmp_path, byte_tokenizer(pad="<|end|>"), [two_turns, turns("2+3", "5")])


def test_each_assistant_turn_has_one_end_label_although_pad_is_the_end_token(samples: list[Sample]) -> None:
    """Labels were removed where `id == pad_id`, so models never learned to stop."""
    batch = pack(samples)
    assert batch.num_padding > 0
    labels = batch.label_N[batch.in_ar_loss_N]
    assert int((labels == END_ID).sum()) == 3
    assert len(labels) == batch.num_response_tokens == len("an end") + len("yes") + len("5") + 3
    in_mask_loss = batch.label_N[batch.in_mask_loss_N]
    assert int((in_mask_loss == END_ID).sum()) == 3
    document_of_source = batch.document_BL.flatten()[batch.source_N]
    assert bool((document_of_source >= 0).all()), "padding predicts nothing"


def test_a_pad_token_in_a_prompt_is_attended_and_padding_is_not(module: LossModule, samples: list[Sample]) -> None:
    """Attention masks made by `id != pad_id` hid that part of the prompt."""
    at = int(np.flatnonzero(samples[0].token_ids == END_ID)[0])
    assert at < samples[0].responses[0][0]
    before = losses(module, pack(samples))
    other_ids = samples[0].token_ids.copy()
    other_ids[at] = 50
    after = losses(module, pack([replace(samples[0], token_ids=other_ids), samples[1]]))
    assert all(abs(a - b) > 1e-3 for a, b in zip(before, after, strict=True))
    batch = pack(samples)
    padding = batch.document_BL < 0
    assert padding.any()
    for token_id in (50, END_ID):
        filled = replace(batch, token_ids_BL=torch.where(padding, token_id, batch.token_ids_BL))
        assert losses(module, filled) == pytest.approx(before, abs=1e-4)


@pytest.mark.parametrize("prompt_format", ["chat", "raw"])
def test_prompts_have_one_bos_and_the_same_ids_in_training_and_in_serving(tmp_path: Path, prompt_format: Any) -> None:
    """A template that writes a BOS and a tokenizer that adds one gave two in training and one in serving."""
    tokenizer = byte_tokenizer()
    assert tokenizer("a")["input_ids"][0] == BOS_ID
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).startswith("<|bos|>")
    rows = [{"prompt": prompt, "response": "b"} for prompt in ("2+3", " é\n", "<|user|>x")]
    samples = samples_of(tmp_path, tokenizer, rows, prompt_format=prompt_format)
    builder = RequestBuilder(
        tokenizer,
        end_ids=ENDS,
        prompt_format=prompt_format,
        prompts=PromptSettings(),
        decoding=RowDecodingSettings(mode="one_token", threshold=None),
    )
    for sample, row in zip(samples, rows, strict=True):
        request = builder.build(PromptRow("id", "here", {"prompt": row["prompt"]}, ""))
        assert isinstance(request, Request)
        assert sample.token_ids[: sample.responses[0][0]].tolist() == list(request.prompt_ids)
        assert sample.token_ids.tolist().count(BOS_ID) == 1


def test_an_empty_answer_trains_its_end_token(module: LossModule, tmp_path: Path) -> None:
    (sample,) = samples_of(tmp_path, byte_tokenizer(), [turns("a", "")], allow_empty_answer=True)
    batch = pack([sample])
    assert batch.num_response_tokens == 1
    assert batch.label_N[batch.in_ar_loss_N].tolist() == batch.label_N[batch.in_mask_loss_N].tolist() == [END_ID]
    assert all(0 < loss < 20 for loss in losses(module, batch))


def test_a_cut_answer_keeps_its_labels_and_teaches_no_end(module: LossModule, tmp_path: Path) -> None:
    (sample,) = samples_of(tmp_path, byte_tokenizer(), [turns("a", "x" * 40)], max_length=32)
    batch = pack([sample])
    labels = batch.label_N[batch.in_ar_loss_N].tolist()
    assert len(sample.token_ids) == 32
    assert len(labels) == 32 - sample.responses[0][0] > 0
    assert END_ID not in labels
