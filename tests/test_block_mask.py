"""FlexAttention: block lists equal to those of the dense mask, built without an L x L tensor, and the same logits."""

import pytest
import torch
import transformers.integrations.flex_attention as flex_integration
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from tiny_models import MASK_ID, MODEL_TYPES, SIZES, random_samples, tiny_model
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

from workers.errors import InputError
from workers.models.loading import backbone_and_head, check_flex_attention, choose_attention, load_causal_lm
from workers.objectives.attention import build_attention_mask, dense_visibility
from workers.objectives.backbone import hidden_states
from workers.objectives.block_mask import build_block_mask
from workers.objectives.mars import MarsObjective
from workers.objectives.probe import check_two_streams
from workers.objectives.streams import PackedBatch, Places

MARS = MarsObjective(4, 1.0, 1.0, True, MASK_ID, seed=3)
LISTS = ("kv", "full_kv", "q", "full_q")  # the q lists are for the backward pass


def pack(num_samples: int, seed: int, row_tokens: int, rows: int = 3) -> list[PackedBatch]:
    return MARS.pack(random_samples(num_samples, seed, num_turns=4), row_tokens=row_tokens, micro_batch_rows=rows)


def listed_blocks(mask: BlockMask, name: str) -> list[list[list[int]]]:
    """For each row and query (or key) block, the blocks in the list."""
    counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
    return [
        [indices[row, 0, block, :count].tolist() for block, count in enumerate(counts[row, 0].tolist())]
        for row in range(len(counts))
    ]


def assert_same_mask(mask: BlockMask, places: Places, window: int | None) -> None:
    num_rows, length = places.document.shape
    reference = create_block_mask(mask.mask_mod, num_rows, None, length, length, device="cpu")
    for name in LISTS:
        assert listed_blocks(mask, name) == listed_blocks(reference, name)
    dense_B1LL = create_mask(mask.mask_mod, num_rows, None, length, length, device="cpu")
    assert torch.equal(dense_B1LL, dense_visibility(places, window))
    assert mask.shape == (num_rows, 1, length, length)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("row_tokens", [1, 128, 300, 1024])
def test_block_lists_and_rule_are_those_of_the_dense_mask(window: int | None, row_tokens: int) -> None:
    batches = pack(40, seed=row_tokens, row_tokens=row_tokens)
    assert any(batch.num_padding for batch in batches)
    for batch in batches[:4]:
        assert_same_mask(build_block_mask(batch.places(), window), batch.places(), window)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_samples=st.integers(1, 25),
    seed=st.integers(0, 999),
    row_tokens=st.integers(1, 700),
    window=st.none() | st.integers(1, 60),
)
def test_any_packing_gives_the_same_blocks(num_samples: int, seed: int, row_tokens: int, window: int | None) -> None:
    for batch in pack(num_samples, seed, row_tokens)[:2]:
        assert_same_mask(build_block_mask(batch.places(), window), batch.places(), window)


def test_blocks_that_are_seen_whole_and_not_at_all_are_told_apart() -> None:
    """One document of 512 clean tokens: causal blocks; were all of them partial, the rule would run on every pair."""
    length = torch.arange(512)[None]
    places = Places(torch.zeros_like(length), torch.zeros_like(length), length, length)
    mask = build_block_mask(places)
    assert listed_blocks(mask, "kv") == [[[0], [1], [2], [3]]]
    assert listed_blocks(mask, "full_kv") == [[[], [0], [0, 1], [0, 1, 2]]]


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    largest = {}
    for length in (1024, 2048, 8192):
        position = torch.arange(length)[None]
        places = Places(position // 1000, torch.zeros_like(position), position % 1000, position % 1000)
        with LargestTensor() as seen:
            build_block_mask(places, 300)
        largest[length] = seen.num_elements
    assert largest == {length: 128 * length for length in largest}  # one block of queries against all keys


@pytest.fixture
def _uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as torch defines it, without its GPU kernels."""

    def run(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **options: object) -> Tensor:
        return flex_attention(query, key, value, **options)

    monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", run)


FLEX_TYPES = [model_type for model_type in MODEL_TYPES if model_type != "gpt2"]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("_uncompiled_flex")
@pytest.mark.parametrize("model_type", FLEX_TYPES)
def test_flex_attention_gives_the_logits_of_the_dense_mask(model_type: str) -> None:
    """The dense ones are proved by the two-stream oracle. Grouped heads, capped scores, windows, both rotary bases."""
    model = tiny_model(model_type)
    _, head, transform = backbone_and_head(model)
    batches = pack(12, seed=7, row_tokens=200)[:2]
    dense = [transform(head(hidden_states(model, batch))) for batch in batches]
    model.set_attn_implementation("flex_attention")
    assert isinstance(
        build_attention_mask(model, batches[0].places()), dict if len(set(windows_of(model))) > 1 else BlockMask
    )
    for batch, dense_BLV in zip(batches, dense, strict=True):
        flex_BLV = transform(head(hidden_states(model, batch)))
        torch.testing.assert_close(flex_BLV, dense_BLV, atol=1e-4, rtol=0)


def windows_of(model: torch.nn.Module) -> list[str]:
    return getattr(model.config, "layer_types", None) or ["one"]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("_uncompiled_flex")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gemma2"])
def test_the_probe_runs_on_flex_attention(model_type: str) -> None:
    model = tiny_model(model_type)
    model.set_attn_implementation("flex_attention")
    check_two_streams(model)


def test_rows_of_any_length_are_compiled_a_few_times_only() -> None:
    """Each batch has masks of its own: were they constants of the kernel, every batch would compile one, up to a limit."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    counts = []
    for seed in range(6):
        for batch in pack(30, seed, row_tokens=300 + 80 * seed):
            mask = build_block_mask(batch.places())
            query_BHLD = torch.randn(batch.token_ids_BL.shape[0], 2, batch.token_ids_BL.shape[1], 16)
            compiled(query_BHLD, query_BHLD, query_BHLD, block_mask=mask)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[2] <= 6


def save(model_type: str, folder: str, **changes: object) -> str:
    model = tiny_model(model_type)
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    return folder


def test_auto_is_flex_on_gpus_where_the_model_can(tmp_path) -> None:
    able = save("llama", str(tmp_path / "able"), head_dim=16)
    unable = save("gpt2", str(tmp_path / "unable"))
    assert choose_attention(able, "auto", on_gpu=True) == "flex"
    assert choose_attention(able, "auto", on_gpu=False) == "dense"
    assert choose_attention(unable, "auto", on_gpu=True) == "dense"
    assert choose_attention(able, "dense", on_gpu=True) == "dense"
    assert choose_attention(unable, "flex", on_gpu=True) == "flex"  # asked for by name: refused, not replaced
    fitting = str(tmp_path / "fitting")
    heads_of_16 = {"num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **heads_of_16})).save_pretrained(fitting)
    loaded = load_causal_lm(fitting, dtype=torch.float32, attention="flex")
    assert loaded.config._attn_implementation == "flex_attention"
    assert torch._dynamo.config.recompile_limit >= 64
    assert load_causal_lm(fitting, dtype=torch.float32).config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("model_type", "changes", "found"),
    [
        ("gpt2", {}, "gpt2, for which transformers has no FlexAttention"),
        ("llama", {"head_dim": 16, "attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("llama", {}, "heads of 8"),
    ],
)
def test_models_that_flex_cannot_train_are_refused(tmp_path, model_type, changes, found) -> None:
    folder = save(model_type, str(tmp_path / "model"), **changes)
    with pytest.raises(InputError, match=rf"model\.attention.*{found}"):
        check_flex_attention(folder)
    with pytest.raises(InputError, match=found):
        load_causal_lm(folder, dtype=torch.float32, attention="flex")
