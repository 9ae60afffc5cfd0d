"""The slots of the cache: read as a view, written in place, rolled back by length, refused when they cannot fit."""

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
from workers.decoding import slot_attention
from workers.decoding.cache import LayerShape, SlotCache, run_backbone
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request
from workers.errors import InputError

SHAPES = [LayerShape(2, 4, 3, torch.float32, torch.device("cpu"))] * 2


def engine_of(model, **changes) -> DecodingEngine:
    options = {"mask_token_id": MASK_ID, "end_ids": {1}, "block_size": 4, "num_slots": 3, "max_length": 40}
    return DecodingEngine(model, ByteTokenizer(), **(options | changes))


def test_tokens_go_to_their_places_and_slots_are_read_as_they_stand():
    """The tokens of a step belong to several rows; what is not to be kept goes to the trash."""
    cache = SlotCache(SHAPES, num_slots=3, max_length=8, num_spare=2)
    keys, values = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 3)
    cache.prepare(torch.tensor([0, 0, 0, 2, 2]), torch.tensor([4, 5, 6, 9, cache.trash_place]))
    read_keys, read_values = cache.update(keys, values, 1)
    assert read_keys.data_ptr() == cache._keys[1].data_ptr()
    assert read_values.data_ptr() == cache._values[1].data_ptr()
    assert (read_keys.shape, read_values.shape) == ((3, 2, 11, 4), (3, 2, 11, 3))
    assert torch.equal(read_keys[0, :, 4:7], keys[0, :, :3])
    assert torch.equal(read_values[2, :, 9], values[0, :, 3])
    assert cache.trash_place == 10
    assert not read_keys[0, :, :4].any() and not read_keys[0, :, 7:].any()
    assert not read_keys[1].any() and not read_keys[2, :, :9].any()
    assert not cache._keys[0].any()


def test_the_cache_is_allocated_once_and_never_copied(monkeypatch):
    """A fault of the published samplers: they copy the whole cache at each step. Here attention reads views of it."""
    engine = engine_of(tiny_model("llama"))
    cache = engine._model._cache
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*cache._keys, *cache._values)}
    read = []
    attend = slot_attention._attend_group

    def watched(group, layer_type, query_NHD, keys_RKTD, values_RKTD, *others):
        read.extend([keys_RKTD.untyped_storage().data_ptr(), values_RKTD.untyped_storage().data_ptr()])
        return attend(group, layer_type, query_NHD, keys_RKTD, values_RKTD, *others)

    monkeypatch.setattr(slot_attention, "_attend_group", watched)
    for mode in ("one_token", "verified"):
        options = RowDecodingSettings(mode=mode, max_new_tokens=5)
        engine.generate_all([Request(place, (2, 3, 4 + place), options) for place in range(9)])
    assert set(read) == storages
    assert {tensor.untyped_storage().data_ptr() for tensor in (*cache._keys, *cache._values)} == storages


def test_slots_that_do_not_fit_are_refused_with_numbers_that_would(monkeypatch):
    monkeypatch.setattr(cache_module, "_free_memory", lambda device: 30_000_000)
    with pytest.raises(InputError) as refusal:
        engine_of(tiny_model("llama"), num_slots=1000, max_length=99)
    # 2 layers, 2 key/value heads of width 8, keys and values, 4 bytes: 256 bytes a token. A slot has 64 spare places for the
    # widest query, and one for the trash.
    assert "1000 slots of 163 tokens at 256 bytes a token: 0.04 GiB" in str(refusal.value)
    assert "714 slots of this length would fit, or a max_length of 52 with this number of slots" in str(refusal.value)
    engine_of(tiny_model("llama"), num_slots=714, max_length=99)
    engine_of(tiny_model("llama"), num_slots=1000, max_length=52)
    for num_slots, max_length in ((715, 99), (1000, 53)):
        with pytest.raises(InputError, match="slots of"):
            engine_of(tiny_model("llama"), num_slots=num_slots, max_length=max_length)


def test_no_length_is_named_when_none_would_fit(monkeypatch):
    monkeypatch.setattr(cache_module, "_free_memory", lambda device: 10_000_000)
    with pytest.raises(InputError, match=r"238 slots of this length would fit\."):
        engine_of(tiny_model("llama"), num_slots=1000, max_length=99)


def test_room_for_branches_grows_with_the_block_size():
    """The widest query of a row has W * W tokens."""
    for block_size, num_spare in ((1, 64), (8, 64), (12, 144)):
        assert engine_of(tiny_model("llama"), block_size=block_size)._model._cache.trash_place == 40 + num_spare


@pytest.mark.parametrize(("block_size", "max_length"), [(15, 80), (16, 5), (1, 2), (8, 128)])
def test_measurements_fit_into_short_slots(block_size, max_length):
    """The widest size is a power of two above W * W: it once was larger than the slot."""
    engine = engine_of(tiny_model("llama"), block_size=block_size, max_length=max_length)
    for num_lanes in (1, block_size**2, 256, 512):
        assert engine._model.measure(2, num_lanes, num_lanes) > 0
    result = engine.generate_all([Request("a", (2,), RowDecodingSettings(max_new_tokens=6))])[0]
    assert len(result.token_ids) == min(6, max_length - 1) or result.finish_reason == "stop"


def test_the_plain_model_is_what_it_was_after_the_engine_ran():
    """Its attention is given back after each step, and after a step that failed."""
    model = tiny_model("gemma2")
    ids = torch.tensor([list(range(2, 14))])
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    implementation = model.config._attn_implementation
    engine = engine_of(model)
    engine.generate_all([Request("a", (2, 3, 4), RowDecodingSettings(max_new_tokens=6))])
    assert model.config._attn_implementation == implementation
    with pytest.raises(AssertionError), slot_attention.slot_attention_in(model.config):
        raise AssertionError
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)


def test_a_measurement_between_steps_writes_nothing_that_is_read():
    model = tiny_model("qwen2_sliding")
    options = RowDecodingSettings(mode="verified", window=3, draft_branches=True, max_new_tokens=12)
    requests = [Request(place, tuple(range(2, 8 + 3 * place)), options) for place in range(3)]
    expected = engine_of(model).generate_all(requests)
    engine = engine_of(model)
    cache, results = engine._model._cache, []
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        results += [progress.result for progress in engine.step() if progress.result is not None]
        before = [tensor[:, :, : cache.trash_place].clone() for tensor in (*cache._keys, *cache._values)]
        for num_lanes in (1, 7, 64):
            assert engine._model.measure(3, num_lanes, num_lanes) > 0
        after = [tensor[:, :, : cache.trash_place] for tensor in (*cache._keys, *cache._values)]
        assert all(map(torch.equal, before, after))
    assert sorted(results, key=lambda result: result.id) == expected


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

    older, marker = Older(), SlotCache(SHAPES, 1, 2)
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
    model = gemma3()
    model.config.layer_types = ["sliding_attention", "chunked_attention"]
    with pytest.raises(InputError, match="chunked_attention"):
        engine_of(model)
