"""Engine = naive loop: any batch, cache, order, window, mode, threshold, budget, stop rule and sampling, token for token.

Rules out the faults of published samplers: acceptance counts shifted by finished rows, mask ids left in slower rows, tokens
behind an end token, budgets rounded up to blocks, and prompt tokens dropped because they look like padding.
"""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_decoding import naive_decode
from scripted_model import ByteTokenizer
from tiny_models import MASK_ID, tiny_model, word_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request, Result, row_seed
from workers.models.export import export_folder
from workers.models.folder import (
    MultiTokenSettings,
    inspect_model_folder,
    load_tokenizer,
    read_multi_token_settings,
)
from workers.models.loading import load_causal_lm

MODEL_TYPES = ["llama", "qwen2", "gpt2", "mistral", "qwen2_sliding", "qwen3", "smollm", "gemma2", "gemma3_text"]
TOKENIZER = ByteTokenizer()
# 0 is the models' pad id: it is an ordinary token of a prompt.
END_IDS = frozenset({0, 1, 7, 12})
BLOCK_SIZE = 4
MAX_LENGTH = 48
MODELS = {model_type: tiny_model(model_type) for model_type in MODEL_TYPES}


def make_engine(model_type: str, **changes) -> DecodingEngine:
    options = {
        "mask_token_id": MASK_ID,
        "end_ids": END_IDS,
        "block_size": BLOCK_SIZE,
        "num_slots": 3,
        "max_length": MAX_LENGTH,
        "cache": "ragged",
        "run_seed": 5,
    }
    return DecodingEngine(MODELS[model_type], TOKENIZER, **(options | changes))


def check_against_oracle(model_type: str, requests: list[Request], results: list[Result]) -> int:
    """Asserts equality with the naive loop; returns the number of rows that differ after a near-tie of the oracle."""
    num_near_ties = 0
    assert [result.id for result in results] == [request.id for request in requests]
    for request, result in zip(requests, results, strict=True):
        answer = naive_decode(
            MODELS[model_type],
            TOKENIZER,
            request,
            row_seed(request, 5),
            mask_id=MASK_ID,
            end_ids=END_IDS,
            block_size=BLOCK_SIZE,
            max_length=MAX_LENGTH,
        )
        if list(result.token_ids) != answer.token_ids and answer.smallest_gap < 1e-5:
            num_near_ties += 1
            continue
        assert list(result.token_ids) == answer.token_ids
        assert (result.text, result.finish_reason) == (answer.text, answer.finish_reason)
        assert result.num_forwards == answer.num_forwards
        assert result.num_prompt_tokens == len(request.prompt_ids)
        assert MASK_ID not in result.token_ids
    return num_near_ties


@st.composite
def row_settings(draw) -> RowDecodingSettings:
    mode = draw(st.sampled_from(["one_token", "tau", "tau", "tau"]))
    score = draw(st.sampled_from(["probability", "margin", "entropy"]))
    thresholds = [0.0, 0.8, 1.7, 3.0] if score == "entropy" else [0.0, 0.2, 0.5, 1.0]
    threshold = draw(st.sampled_from(thresholds))
    return RowDecodingSettings(
        mode=mode,
        score=score,
        threshold=threshold if mode == "tau" else None,
        window=draw(st.sampled_from([None, 1, 2, 3, 5, 8])),
        max_new_tokens=draw(st.integers(1, 14)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8, 0.3])),
        seed=draw(st.sampled_from([None, 3, 2**63 + 11])),
        stop=draw(st.sampled_from([(), (), ("\x05",), ("\x1f\x02", "\x10"), ("$",)])),
    )


def requests_of(min_rows: int, max_rows: int) -> st.SearchStrategy[list[Request]]:
    prompt = st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=17).map(tuple)
    row = st.tuples(prompt, row_settings())
    return st.lists(row, min_size=min_rows, max_size=max_rows).map(
        lambda rows: [Request(f"row{place}", *row) for place, row in enumerate(rows)]
    )


def few_examples(count: int):
    return settings(
        max_examples=count, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("cache", ["ragged", "none"])
@few_examples(12)
@given(requests=requests_of(1, 7))
def test_engine_equals_the_naive_loop(model_type, cache, requests):
    engine = make_engine(model_type, cache=cache)
    results = engine.generate_all(requests)
    assert check_against_oracle(model_type, requests, results) == 0
    assert engine.statistics.num_rows == len(requests)
    assert engine.statistics.num_kept_tokens == sum(len(result.token_ids) for result in results)
    assert engine.statistics.num_row_forwards == sum(result.num_forwards for result in results)


@few_examples(15)
@given(requests=requests_of(2, 6), data=st.data())
def test_alone_batched_and_permuted_are_the_same(requests, data):
    engine = make_engine("llama")
    batched = {result.id: result for result in engine.generate_all(requests)}
    permuted = make_engine("llama", num_slots=data.draw(st.integers(1, 6))).generate_all(
        data.draw(st.permutations(requests))
    )
    alone = [make_engine("llama", num_slots=1).generate_all([request])[0] for request in requests]
    assert {result.id: result for result in permuted} == batched
    assert {result.id: result for result in alone} == batched


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
        cache="ragged",
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
                recorded[-1][result.id] = (result.token_ids, seen[result.id])
    for other in recorded[1:]:
        for row, (tokens, logits) in recorded[0].items():
            assert other[row][0] == tokens
            assert len(other[row][1]) == len(logits)
            for ours, theirs in zip(logits, other[row][1], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def record_logits(engine: DecodingEngine) -> dict:
    """Collects, for each row id, the logits of each of its forwards, as the engine computes them."""
    seen: dict = {}
    current: list = []
    forward, head = engine._forward, engine._head

    def recording_forward(rows, queries, plan_BC, num_lanes):
        current[:] = [(row.request.id, query.num_picks) for row, query in zip(rows, queries, strict=True)]
        return forward(rows, queries, plan_BC, num_lanes)

    def recording_head(hidden_BWD):
        logits_BWV = head(hidden_BWD)
        for place, (row, num_picks) in enumerate(current):
            seen.setdefault(row, []).append(logits_BWV[place, :num_picks].clone())
        return logits_BWV

    engine._forward, engine._head = recording_forward, recording_head
    return seen


def test_logits_after_uneven_acceptance_equal_a_full_recomputation():
    """Case 4: rows accept different numbers in one step, and one ends; the next logits are those of a full forward."""
    requests = [
        Request(
            place, tuple(range(2 + place, 9 + 3 * place)), RowDecodingSettings(threshold=threshold, max_new_tokens=15)
        )
        for place, threshold in enumerate([0.0, 0.999, 0.25, 0.25, 0.0])
    ]
    engine = make_engine("llama", num_slots=3, end_ids=frozenset({1}))
    seen = record_logits(engine)
    results = engine.generate_all(requests)
    kept_counts = set()
    for request, result in zip(requests, results, strict=True):
        tokens, num_done = list(result.token_ids), 0
        for logits_WV in seen[request.id]:
            clean = [*request.prompt_ids, *tokens[:num_done]]
            with torch.no_grad():
                ids = torch.tensor([clean + [MASK_ID] * (len(logits_WV) - 1)])
                expected_WV = MODELS["llama"](ids, use_cache=False).logits[0, len(clean) - 1 :]
            expected_WV[:, MASK_ID] = logits_WV[:, MASK_ID]
            torch.testing.assert_close(logits_WV, expected_WV, atol=1e-4, rtol=0)
            num_kept = 1
            probability_WV = expected_WV.index_fill(1, torch.tensor(MASK_ID), -torch.inf).softmax(-1)
            while num_kept < len(logits_WV) and probability_WV[num_kept].max() >= request.decoding.threshold:
                num_kept += 1
            kept_counts.add(num_kept)
            num_done += num_kept
    assert {1, 4} <= kept_counts
