"""Pins the tokenizer made from the data (round trip, single digits, chat template) and the from-scratch model folder."""

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pipelines.quickstart_task import generate_rows
from pipelines.tokenizer_training import SPECIAL_TOKENS, create_model_folder, train_tokenizer
from workers.config import FromScratch
from workers.errors import InputError

SETTINGS = FromScratch(
    hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=64
)


def _texts() -> list[str]:
    train, _ = generate_rows(0, 500, 1, 0.4)
    return [message["content"] for row in train for message in row["messages"]]


TOKENIZER = train_tokenizer(iter(_texts()), vocab_size=512, max_positions=64)


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    """The byte alphabet is complete although the training texts hold few letters."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text


def test_every_digit_is_a_token_of_its_own() -> None:
    pieces = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("x 1234, 56.7", add_special_tokens=False))
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("1234567")


def test_every_word_of_the_quickstart_is_one_token() -> None:
    words = {(" " if position else "") + word for text in _texts() for position, word in enumerate(text.split(" "))}
    letters = {word for word in words if word.strip().isalpha()}
    assert len(letters) > 20
    assert all(len(TOKENIZER.encode(word, add_special_tokens=False)) == 1 for word in letters)


def test_special_tokens_are_single_ids_and_the_mask_is_declared() -> None:
    assert TOKENIZER.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == list(SPECIAL_TOKENS)
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token, TOKENIZER.mask_token) == ("<|pad|>", "<|end|>", "<|mask|>")


def test_chat_template_renders_turns_systems_and_the_generation_prompt() -> None:
    messages = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    text = "<|system|> Be brief.\n<|end|><|user|>1+1?<|end|><|assistant|>2<|end|><|user|>2+2?<|end|>"
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == text
    assert TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text + "<|assistant|>"


def test_an_unknown_role_is_an_error_of_the_template() -> None:
    with pytest.raises(TemplateError, match="unknown role: tool"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(InputError, match="vocab_size"):
        train_tokenizer(iter(["a"]), vocab_size=261, max_positions=64)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_model_folder_loads_with_its_end_and_pad_ids(tmp_path: Path, architecture: str) -> None:
    """AutoTokenizer gives a qwen2 folder Qwen2's own pre-tokenizer and unknown token: ids must not change by it."""
    create_model_folder(SETTINGS.model_copy(update={"architecture": architecture}), TOKENIZER, tmp_path, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (model.config.model_type, model.dtype) == (architecture, torch.float32)
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 16)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    for text in [*_texts()[:20], "It's  über 1 234,5%!?\n\n\tx = {y};\r\n  <|mask|> 日本"]:
        assert tokenizer.encode(text) == TOKENIZER.encode(text)
    assert tokenizer.mask_token_id == TOKENIZER.mask_token_id
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert tokenizer.model_max_length == 64
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_the_weights_depend_on_the_seed_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        create_model_folder(SETTINGS, TOKENIZER, tmp_path / name, seed=seed)
    assert torch.equal(state, torch.get_rng_state())
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / name).lm_head.weight for name in "abc")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
