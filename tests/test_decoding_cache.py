"""The ragged cache: read as a view, written in place, rolled back by length, refused when it cannot fit."""

import inspect
from pathlib import Path

import pytest
import torch
from scripted_model import ByteTokenizer
from tiny_models import MASK_ID, SIZES, tiny_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import workers.decoding
from workers.config import RowDecodingSettings
from workers.decoding import cache as cache_module
from workers.decoding.cache import LayerShape, RaggedCache, run_backbone
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request
from workers.decoding.visibility import Visibility
from workers.errors import InputError

SHAPES = [LayerShape(2, 4, 3, torch.float32, torch.device("cpu"))] * 2


def engine_of(model, **changes) -> DecodingEngine:
    options = {
        "mask_token_id": MASK_ID,
        "end_ids": {1},
        "block_size": 4,
        "num_slots": 3,
        "max_length": 40,
        "cache": "ragged",
    }
    return DecodingEngine(model, ByteTokenizer(), **(options | changes))


def test_reading_slots_is_a_view_and_padding_goes_to_the_trash():
    cache = RaggedCache(SHAPES, num_slots=3, max_length=10)
    keys, values = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 3)
    cache.prepare(torch.tensor([0, 1]), torch.tensor([[4, 5, 6], [2, 3, cache.trash_place]]), num_read=7)
    read_keys, read_values = cache.update(keys, values, 1)
    assert read_keys.data_ptr() == cache._keys[1].data_ptr()
    assert read_values.data_ptr() == cache._values[1].data_ptr()
    assert (read_keys.shape, read_values.shape) == ((2, 2, 7, 4), (2, 2, 7, 3))
    assert torch.equal(read_keys[0, :, 4:7], keys[0])
    assert torch.equal(read_values[1, :, 2:4], values[1, :, :2])
    assert not read_keys[1, :, 4:].any()
    assert not cache._keys[0].any()
    assert not cache._keys[1][2].any()


def test_new_rows_see_their_own_query_tokens_only():
    cache = RaggedCache(SHAPES, num_slots=3, max_length=10)
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 3)
    cache.prepare(torch.tensor([2]), torch.tensor([[0, 1, 2]]), num_read=None)
    assert all(map(torch.equal, cache.update(keys, values, 0), (keys, values)))
    assert torch.equal(cache._keys[0][2, :, :3], keys[0])


def test_a_move_takes_the_row_to_its_new_slot():
    cache = RaggedCache(SHAPES, num_slots=3, max_length=10)
    cache.prepare(torch.tensor([2]), torch.tensor([[0, 1, 2]]), num_read=None)
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 3)
    for layer in (0, 1):
        cache.update(keys, values, layer)
    cache.move(2, 0, 2)
    assert torch.equal(cache._keys[1][0, :, :2], keys[0, :, :2])
    assert torch.equal(cache._values[0][0, :, :2], values[0, :, :2])
    assert not cache._keys[1][0, :, 2:].any()


def test_the_cache_is_allocated_once_and_never_copied():
    """A fault of the published samplers: they copy the whole cache at each step."""
    engine = engine_of(tiny_model("llama"))
    before = [tensor.data_ptr() for tensor in (*engine._cache._keys, *engine._cache._values)]
    moved = []
    move = engine._cache.move
    engine._cache.move = lambda *places: (moved.append(places), move(*places))
    options = RowDecodingSettings(mode="one_token", max_new_tokens=5)
    engine.generate_all([Request(place, (2, 3, 4 + place), options) for place in range(9)])
    assert [tensor.data_ptr() for tensor in (*engine._cache._keys, *engine._cache._values)] == before
    assert moved == []


def test_slots_that_do_not_fit_are_refused_with_numbers_that_would(monkeypatch):
    monkeypatch.setattr(cache_module, "_free_memory", lambda device: 10_000_000)
    with pytest.raises(InputError) as refusal:
        engine_of(tiny_model("llama"), num_slots=1000, max_length=99)
    # 2 layers, 2 key/value heads of width 8, keys and values, 4 bytes: 256 bytes a token.
    assert "1000 slots of 99 tokens at 256 bytes a token: 0.02 GiB" in str(refusal.value)
    assert "390 slots of this length would fit, or 38 tokens with this number of slots" in str(refusal.value)
    engine_of(tiny_model("llama"), num_slots=390, max_length=99)
    engine_of(tiny_model("llama"), num_slots=1000, max_length=38)


def test_free_memory_is_known_here():
    assert cache_module._free_memory(torch.device("cpu")) > 1 << 20


def test_the_name_of_the_cache_keyword_stands_in_one_place():
    """transformers renames `past_key_values` to `cache`; older and newer versions both run."""
    files = Path(workers.decoding.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "past_key_values" in file.read_text()] == ["cache.py"]
    assert inspect.getsource(cache_module).count("past_key_values") == 1

    class Older(torch.nn.Module):
        def forward(self, input_ids, attention_mask, position_ids, use_cache, past_key_values=None):
            self.seen = past_key_values
            return type("Outputs", (), {"last_hidden_state": input_ids})

    older, marker = Older(), RaggedCache(SHAPES, 1, 2)
    run_backbone(older, torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, 1, 1), marker)
    assert older.seen is marker


def gemma3() -> Gemma3ForCausalLM:
    """Both kinds of layers in one model, and a softcap behind the head."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=5.0,
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make_model", [gemma3, lambda: tiny_model("mistral"), lambda: tiny_model("qwen2_sliding")])
def test_sliding_windows_are_counted_by_position(make_model, attention):
    """Prompts and answers beyond the window of 5: the same tokens as the unmodified model, which makes its own masks."""
    model = make_model()
    model.set_attn_implementation(attention)
    options = RowDecodingSettings(mode="one_token", max_new_tokens=16)
    prompts = [tuple(range(2, 2 + length)) for length in (3, 11, 6)]
    results = engine_of(model).generate_all([Request(length, prompt, options) for length, prompt in enumerate(prompts)])
    for prompt, result in zip(prompts, results, strict=True):
        for place, token in enumerate(result.token_ids):
            with torch.no_grad():
                logits_V = model(torch.tensor([[*prompt, *result.token_ids[:place]]]), use_cache=False).logits[0, -1]
            logits_V[MASK_ID] = -torch.inf
            assert token == logits_V.argmax()


def test_layers_that_no_mask_by_position_can_express_are_refused():
    config = gemma3().config
    config.layer_types = ["sliding_attention", "chunked_attention"]
    with pytest.raises(InputError, match="chunked_attention"):
        Visibility(config, torch.float32)
