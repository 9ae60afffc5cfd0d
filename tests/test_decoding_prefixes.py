"""Prompts that begin alike are prefilled once, and a model that the engine would decode wrongly is refused."""

import pytest
import torch
from scripted_model import ByteTokenizer
from tiny_models import MASK_ID, tiny_model
from torch import nn

from workers.config import RowDecodingSettings
from workers.decoding import slot_attention
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request
from workers.decoding.scheduler import num_shared
from workers.errors import InputError

COMMON = tuple(2 + 7 * place % 37 for place in range(40))
OPTIONS = RowDecodingSettings(mode="one_token", max_new_tokens=6)


def make_engine(model: nn.Module, **changes: object) -> DecodingEngine:
    options = {"end_ids": set(), "block_size": 4, "num_slots": 3, "max_length": 80, "cache": "ragged"}
    return DecodingEngine(model, ByteTokenizer(), mask_token_id=MASK_ID, **(options | changes))


@pytest.mark.parametrize("cache", ["ragged", "block"])
@pytest.mark.parametrize("prefill_chunk", [512, 7])
def test_a_common_beginning_runs_once_and_changes_no_token(cache: str, prefill_chunk: int) -> None:
    model = tiny_model("qwen3")
    prompts = [COMMON + (5, 6), COMMON + (9,), COMMON[:39], COMMON + (5, 6, 7, 8), (3, 4), COMMON + (5, 6)]
    requests = [Request(place, prompt, OPTIONS) for place, prompt in enumerate(prompts)]
    engine = make_engine(model, cache=cache, prefill_chunk=prefill_chunk, cache_block=3)
    alone = [make_engine(model, cache="none").generate_all([request])[0].token_ids for request in requests]
    results = engine.generate_all(requests)
    assert [result.token_ids for result in results] == alone
    # Each runs what it shares with no row that is running then: at least its last token.
    own = [42, 1, 1, 4, 2, 1]
    prompt_tokens = [result.num_query_tokens for result in results]
    if cache == "ragged":
        assert prompt_tokens == [length + 5 for length in own]
    assert prompt_tokens[1] < 20


def test_short_common_beginnings_are_not_waited_for() -> None:
    requests = [Request(place, COMMON[:20] + (place + 2,), OPTIONS) for place in range(3)]
    engine = make_engine(tiny_model("llama"))
    results = engine.generate_all(requests)
    assert [result.num_query_tokens for result in results] == [21 + 5] * 3
    assert engine.statistics.num_model_calls == 6


def test_what_two_prompts_have_in_common() -> None:
    assert num_shared((1, 2, 3), (1, 2, 4), 3) == 2
    assert num_shared((1, 2, 3), (1, 2, 3, 4), 2) == 2
    assert num_shared((1, 2, 3), (1, 2), 3) == 2
    assert num_shared((1,), (2,), 1) == num_shared((), (1,), 0) == 0


def test_a_model_is_compared_with_itself_before_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    engine = make_engine(model)
    engine.check(model)
    attend = slot_attention._attend_group

    def wrong_scale(*arguments: object) -> torch.Tensor:
        return attend(*arguments[:5], 0.9, None)

    with monkeypatch.context() as patch:
        patch.setattr(slot_attention, "_attend_group", wrong_scale)
        with pytest.raises(InputError, match=r"model type: found llama, whose logits differ by .* of the largest one"):
            engine.check(model)

    class OwnAttention(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **others: object) -> None:
            raise RuntimeError("shapes do not fit")

    model.model.layers[0].self_attn, earlier = OwnAttention(), model.model.layers[0].self_attn
    expected = torch.zeros(1, 8, model.config.vocab_size)
    monkeypatch.setattr(type(model), "forward", lambda self, *a, **k: type("Outputs", (), {"logits": expected}))
    with pytest.raises(InputError, match="whose layers fail with RuntimeError: shapes do not fit"):
        engine.check(model)
    model.model.layers[0].self_attn = earlier


def test_a_short_slot_is_no_reason_to_refuse_a_model() -> None:
    for max_length in (2, 3, 7):
        model = tiny_model("gpt2")
        make_engine(model, max_length=max_length).check(model)


def test_positions_that_depend_on_the_longest_row_are_refused_beyond_their_original_length() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    with pytest.raises(InputError, match=r"decoding\.max_length: found 80, .*longrope.* expected at most 64"):
        make_engine(model)
    make_engine(model, max_length=64)
