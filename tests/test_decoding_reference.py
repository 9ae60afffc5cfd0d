"""Tokens and logits of the engine against `transformers` itself: `generate`, exported folders, full recomputations."""

import copy

import pytest
import torch
from random_requests import END_IDS, MODEL_TYPES, MODELS, make_engine
from tiny_models import MASK_ID, word_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request
from workers.models.export import export_folder
from workers.models.folder import (
    MultiTokenSettings,
    inspect_model_folder,
    load_tokenizer,
    read_multi_token_settings,
)
from workers.models.loading import load_causal_lm


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_one_token_mode_equals_generate(model_type):
    """Greedy `generate` of transformers with [MASK] suppressed, row by row."""
    model = MODELS[model_type]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, MASK_ID, (length,), generator=generator).tolist() for length in (3, 9, 17, 1, 8)]
    options = RowDecodingSettings(mode="one_token", max_new_tokens=20)
    results = make_engine(model_type).generate_all(
        [Request(place, tuple(prompt), options) for place, prompt in enumerate(prompts)]
    )
    config = GenerationConfig(
        max_new_tokens=20, do_sample=False, suppress_tokens=[MASK_ID], eos_token_id=sorted(END_IDS), pad_token_id=0
    )
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert list(result.token_ids) == output[0, len(prompt) :].tolist()
        assert result.num_forwards == len(result.token_ids)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_sliding", "gpt2"])
def test_one_token_mode_equals_generate_of_the_exported_folder(model_type, tmp_path):
    """`transformers` loads the folder with its own generation config, in which the export has suppressed [MASK]."""
    folder = str(tmp_path / "model")
    model = copy.deepcopy(MODELS[model_type])
    # The tokenizer ends with 2, the model with 1.
    model.generation_config.eos_token_id = [1, 2]
    settings = MultiTokenSettings(mask_token_id=MASK_ID, block_size=4, prompt_format="raw", objective="mars")
    export_folder(None, model, word_tokenizer(), settings, folder)
    engine = DecodingEngine(
        load_causal_lm(folder, dtype=torch.float32),
        load_tokenizer(folder),
        mask_token_id=read_multi_token_settings(folder).mask_token_id,
        end_ids=inspect_model_folder(folder).end_ids,
        block_size=1,
        num_slots=4,
        max_length=None,
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, MASK_ID, (length,), generator=generator).tolist() for length in range(1, 25)]
    # End tokens inside and at the end of a prompt are ordinary tokens.
    prompts += [[5, 1, 9, 2, 7], [8, 1], [2]]
    options = RowDecodingSettings(mode="one_token", max_new_tokens=40)
    results = engine.generate_all([Request(place, tuple(prompt), options) for place, prompt in enumerate(prompts)])
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        output = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        assert list(result.token_ids) == output[0, len(prompt) :].tolist()
    assert {result.finish_reason for result in results} == {"stop", "length"}


@pytest.mark.parametrize("mode", ["one_token", "verified"])
def test_penalties_forbidden_and_early_end_tokens_equal_generate(mode):
    """The options of `generate` by its own rules, on a batch of rows that have other ones."""
    model = MODELS["qwen3"]
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, MASK_ID, (length,), generator=generator).tolist() for length in (3, 9, 17)]
    window = {} if mode == "one_token" else {"window": 4, "draft_branches": True}
    options = {"mode": mode, "max_new_tokens": 20, "min_new_tokens": 6, "forbidden_ids": (5, 6, 20), "logprobs": True}
    settings = [RowDecodingSettings(repetition_penalty=penalty, **options, **window) for penalty in (1.0, 1.5, 0.8)]
    requests = [Request(place, tuple(prompt), settings[place]) for place, prompt in enumerate(prompts)]
    for request, result in zip(requests, make_engine("qwen3").generate_all(requests), strict=True):
        config = GenerationConfig(
            max_new_tokens=20,
            min_new_tokens=6,
            do_sample=False,
            suppress_tokens=[MASK_ID, 5, 6, 20],
            eos_token_id=sorted(END_IDS),
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        ids = torch.tensor([request.prompt_ids])
        penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(request.decoding.repetition_penalty)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=penalty
        )
        assert list(result.token_ids) == output.sequences[0, ids.shape[1] :].tolist()
        expected = [
            scores_1V.log_softmax(-1)[0, token].item()
            for token, scores_1V in zip(result.token_ids, output.scores, strict=True)
        ]
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def record_logits(engine: DecodingEngine) -> dict:
    """Collects, for each row id and forward: the answer so far, the query's tokens, and the logits of all of them."""
    seen: dict = {}
    next_turns, pack, forward = engine._scheduler.next_turns, engine._model.pack, engine._model.forward
    turns: list = []
    current: list = []

    def recording_turns():
        turns[:], copies = next_turns()
        return list(turns), copies

    def recording_pack(placed):
        current[:] = [(turn.row, each.query) for turn, each in zip(turns, placed, strict=True)]
        return pack(placed)

    def recording_forward(step, **options):
        hidden_ND = forward(step, **options)
        logits_NV = engine._model.logits(hidden_ND)
        for (row, query), first in zip(current, step.first_B.tolist(), strict=True):
            own_LV = logits_NV[first : first + len(query.token_ids)].clone()
            seen.setdefault(row.request.id, []).append((row.token_ids[: row.num_cached], query, own_LV))
        return hidden_ND

    engine._scheduler.next_turns = recording_turns
    engine._model.pack, engine._model.forward = recording_pack, recording_forward
    return seen


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_prompts_of_3_9_and_17_tokens_have_the_same_logits_in_any_batch(model_type):
    """Case 3: alone, batched and permuted; rotary and learned positions; logits within 1e-5."""
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(
            length,
            tuple(torch.randint(2, MASK_ID, (length,), generator=generator).tolist()),
            RowDecodingSettings(mode="tau", threshold=0.3, max_new_tokens=12),
        )
        for length in (3, 9, 17)
    ]
    recorded = []
    for batch in ([requests], [requests[::-1]], [[request] for request in requests]):
        recorded.append({})
        for part in batch:
            engine = make_engine(model_type)
            seen = record_logits(engine)
            for result in engine.generate_all(part):
                recorded[-1][result.id] = (result.token_ids, [logits for _, _, logits in seen[result.id]])
    for other in recorded[1:]:
        for row, (tokens, logits) in recorded[0].items():
            assert other[row][0] == tokens
            assert len(other[row][1]) == len(logits)
            for ours, theirs in zip(logits, other[row][1], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", ["ragged", "block"])
@pytest.mark.parametrize("mode", ["tau", "verified"])
def test_logits_after_uneven_acceptance_equal_a_full_recomputation(cache, mode):
    """Case 4: rows accept different numbers in one step, and one ends; the next logits are those of a full forward."""
    thresholds = [0.0, 0.999, 0.25, 0.25, 0.0]
    requests = [
        Request(
            place,
            tuple(range(2 + place, 9 + 3 * place)),
            RowDecodingSettings(mode=mode, threshold=threshold if mode == "tau" else None, window=4, max_new_tokens=15),
        )
        for place, threshold in enumerate(thresholds)
    ]
    engine = make_engine("llama", num_slots=3, end_ids=frozenset({1}), cache=cache, cache_block=6)
    seen = record_logits(engine)
    results = engine.generate_all(requests)
    for request in requests:
        for cached, query, logits_LV in seen[request.id]:
            # Without branches a query is plain causal: real tokens and one run of placeholders.
            assert query.num_runs == 1
            with torch.no_grad():
                ids = torch.tensor([[*cached, *query.token_ids]])
                expected_LV = MODELS["llama"](ids, use_cache=False).logits[0, len(cached) :]
            torch.testing.assert_close(logits_LV, expected_LV, atol=1e-4, rtol=0)
    kept = {number for result in results for number in result.kept_per_forward}
    assert {1, 4} <= kept if mode == "tau" else {1, 2} <= kept
