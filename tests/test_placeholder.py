"""Which id becomes [MASK]."""

import pytest
from tiny_models import word_tokenizer

from workers.errors import InputError
from workers.models.placeholder import Placeholder, find_placeholder


@pytest.mark.parametrize(
    "name",
    [
        "<|reserved_special_token_0|>",
        "<|reserved_0|>",
        "<unused7>",
        "[unused3]",
        "<extra_id_0>",
        "<|dummy_4|>",
        "[control_8]",
        "<SPECIAL_20>",
        "<|mask|>",
        "<mask>",
        "[MASK]",
        "<|mdm_mask|>",
    ],
)
def test_free_names_are_found(name: str) -> None:
    tokenizer = word_tokenizer("<|im_start|>", "<|vision_pad|>", name)
    assert find_placeholder(tokenizer, len(tokenizer)) == Placeholder(10, added_row=False)


def test_order_of_preference() -> None:
    tokenizer = word_tokenizer("<unused0>", "<|mask|>", "<own>", mask_token="<own>")
    assert find_placeholder(tokenizer, 20).token_id == 10
    tokenizer.mask_token = None
    assert find_placeholder(tokenizer, 20).token_id == 9
    assert find_placeholder(word_tokenizer("<unused0>"), 20).token_id == 8
    assert find_placeholder(word_tokenizer("<other>"), 20, add_mask_row=True) == Placeholder(9, added_row=False)
    assert find_placeholder(word_tokenizer("<other>"), 9, add_mask_row=True) == Placeholder(9, added_row=True)


def test_no_free_id_is_an_error_with_advice() -> None:
    with pytest.raises(InputError, match="add_mask_row=true.*model.mask_token"):
        find_placeholder(word_tokenizer("<other>"), 9)


def test_ordinary_words_and_names_without_a_row_are_passed_over() -> None:
    """`reserved` and `mask` are words here, and the id of <unused0> has no embedding row."""
    with pytest.raises(InputError):
        find_placeholder(word_tokenizer("<unused0>"), 8)


@pytest.mark.parametrize("role", ["eos_token", "bos_token", "pad_token", "unk_token"])
def test_tokens_with_a_role_are_never_taken(role: str) -> None:
    """Llama recipes like to pad with a reserved token; some models have pad = mask."""
    for name in ("<unused0>", "<mask>"):
        assert find_placeholder(word_tokenizer(name, "<unused1>", **{role: name}), 10).token_id == 9
        with pytest.raises(InputError):
            find_placeholder(word_tokenizer(name, **{role: name}), 9)
        with pytest.raises(InputError, match="without another role"):
            find_placeholder(word_tokenizer(name, **{role: name}), 20, mask_token=name)


def test_tokens_of_the_chat_template_are_never_taken() -> None:
    tokenizer = word_tokenizer("<unused0>", "<unused1>")
    tokenizer.chat_template = "{% for m in messages %}<unused0>{{ m.content }}{% endfor %}"
    assert find_placeholder(tokenizer, 10).token_id == 9
    with pytest.raises(InputError, match="chat template"):
        find_placeholder(tokenizer, 10, mask_token="<unused0>")


def test_token_asked_for() -> None:
    tokenizer = word_tokenizer("<unused0>", "<own>")
    assert find_placeholder(tokenizer, 10, mask_token="<own>") == Placeholder(9, added_row=False)
    with pytest.raises(InputError, match="mask_token"):
        find_placeholder(tokenizer, 10, mask_token="<unknown>")
    with pytest.raises(InputError, match="mask_token"):
        find_placeholder(tokenizer, 9, mask_token="<own>")
