"""Messages to token ids: spans, one BOS, training prompt = serving prompt, and every reason for a rejection."""

from typing import Any

import pytest
from chat_tokenizers import (
    BOS_ID,
    CHAT_TEMPLATE,
    CLOSING_TEMPLATE,
    END_ID,
    ENDLESS_TEMPLATE,
    EOS_ID,
    PAD_ID,
    REWRITING_TEMPLATE,
    byte_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st

from workers import chat
from workers.chat import Conversation, Rejected, encode_conversation, encode_pair, encode_prompt, fit_to_length
from workers.errors import InputError

ENDS = frozenset([END_ID])
TOKENIZER = byte_tokenizer()


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TURNS = [
    message("system", "be brief"),
    message("user", "2+3"),
    message("assistant", "5"),
    message("user", "and é?"),
    message("assistant", "no\n"),
    message("tool", "{}"),
    message("assistant", "ok"),
]


def reason_of(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(Rejected) as caught:
        call(*args, **options)
    assert caught.value.reason in chat.REJECTION_REASONS
    assert caught.value.detail
    return caught.value.reason


def test_sequence_is_the_rendered_text_and_spans_are_answers_with_their_end() -> None:
    conversation = encode_conversation(TOKENIZER, TURNS, end_ids=ENDS)
    text = TOKENIZER.apply_chat_template(TURNS, tokenize=False)
    assert TOKENIZER.decode(conversation.token_ids) == text.removesuffix("\n")
    spans = [TOKENIZER.decode(conversation.token_ids[start:end]) for start, end in conversation.responses]
    assert spans == ["5<|end|>", "no\n<|end|>", "ok<|end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, ENDLESS_TEMPLATE, CLOSING_TEMPLATE])
def test_training_prompt_ids_are_serving_prompt_ids_for_every_turn(template: str) -> None:
    """A template that writes a BOS and a tokenizer that adds one gave two, and other ids in training than in serving."""
    tokenizer = byte_tokenizer(template, eos="<|eos|>")
    conversation = encode_conversation(tokenizer, TURNS, end_ids=ENDS)
    answers = [index for index, turn in enumerate(TURNS) if turn["role"] == "assistant"]
    assert len(answers) == len(conversation.responses) == 3
    for index, (start, end) in zip(answers, conversation.responses, strict=True):
        prompt = encode_prompt(tokenizer, TURNS[:index], prompt_format="chat", end_ids=ENDS)
        assert prompt == conversation.token_ids[:start]
        assert conversation.token_ids[end - 1] == (EOS_ID if template == ENDLESS_TEMPLATE else END_ID)
    assert conversation.token_ids.count(BOS_ID) == ("bos_token" in template)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=7))
def test_training_prompt_is_serving_prompt_for_any_text(texts: list[str]) -> None:
    turns = [message("user" if index % 2 == 0 else "assistant", text) for index, text in enumerate(texts)]
    conversation = encode_conversation(TOKENIZER, turns, end_ids=ENDS)
    for number, (start, end) in enumerate(conversation.responses):
        assert (
            encode_prompt(TOKENIZER, turns[: 2 * number + 1], prompt_format="chat", end_ids=ENDS)
            == (conversation.token_ids[:start])
        )
        assert TOKENIZER.decode(conversation.token_ids[start:end]) == texts[2 * number + 1] + "<|end|>"


def test_pad_is_end_of_turn_and_literal_special_tokens_stay() -> None:
    """Trainers that mask labels and attention by `id == pad_id` lose the end token and this part of the prompt."""
    tokenizer = byte_tokenizer(pad="<|end|>")
    turns = [message("user", "what is <|end|> or <|pad|>?"), message("assistant", "an <|end|> token"), *TURNS[1:3]]
    conversation = encode_conversation(tokenizer, turns, end_ids=ENDS)
    (start, end), (second_start, second_end) = conversation.responses
    assert conversation.token_ids[:start].count(END_ID) == 2  # the user's and the template's
    assert conversation.token_ids[:start].count(PAD_ID) == 1
    assert tokenizer.decode(conversation.token_ids[start:end]) == "an <|end|> token<|end|>"
    assert tokenizer.decode(conversation.token_ids[second_start:second_end]) == "5<|end|>"


def test_trailing_user_turn_is_left_out() -> None:
    conversation = encode_conversation(TOKENIZER, TURNS[:4], end_ids=ENDS)
    assert conversation == encode_conversation(TOKENIZER, TURNS[:3], end_ids=ENDS)


def test_pair_in_chat_format_is_a_conversation_of_two_turns() -> None:
    pair = encode_pair(TOKENIZER, "2+3", "5", prompt_format="chat", end_ids=ENDS)
    assert pair == encode_conversation(TOKENIZER, TURNS[1:3], end_ids=ENDS)
    assert pair.token_ids[: pair.responses[0][0]] == encode_prompt(TOKENIZER, "2+3", prompt_format="chat", end_ids=ENDS)


@pytest.mark.parametrize("adds_eos", [False, True])
def test_raw_pair_has_one_bos_in_front_and_one_eos_behind(adds_eos: bool) -> None:
    tokenizer = byte_tokenizer(None, eos="<|eos|>", adds_eos=adds_eos)
    pair = encode_pair(tokenizer, "2+3=", "5", prompt_format="raw", end_ids=frozenset([EOS_ID]))
    assert tokenizer.decode(pair.token_ids) == "<|bos|>2+3=5<|eos|>"
    (start, end) = pair.responses[0]
    assert (start, end) == (5, 7)
    assert encode_prompt(tokenizer, "2+3=", prompt_format="raw", end_ids=ENDS) == pair.token_ids[:start]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], chat.NO_ASSISTANT_TURN),
        ([message("user", "a")], chat.NO_ASSISTANT_TURN),
        ([message("assistant", "a")], chat.NO_PROMPT),
        ([message("user", "a"), message("narrator", "b")], chat.UNKNOWN_ROLE),
        ([message("user", "a"), {"content": "b"}], chat.UNKNOWN_ROLE),
        ([message("user", "a"), message("assistant", None)], chat.NULL_CONTENT),
        ([message("user", "a"), {"role": "assistant"}], chat.NULL_CONTENT),
        (None, chat.NULL_CONTENT),
        ([message("user", " \n"), message("assistant", "b")], chat.EMPTY_CONTENT),
        ([message("user", "a"), message("assistant", "")], chat.EMPTY_CONTENT),
        ("user: a", chat.WRONG_TYPE),
        ({"role": "user"}, chat.WRONG_TYPE),
        ([message("user", 3), message("assistant", "b")], chat.WRONG_TYPE),
        (["a", "b"], chat.WRONG_TYPE),
        ([message("user", "\ud800"), message("assistant", "b")], chat.INVALID_TEXT),
    ],
)
def test_reasons(messages: Any, reason: str) -> None:
    assert reason_of(encode_conversation, TOKENIZER, messages, end_ids=ENDS) == reason


def test_unhashable_role_is_unknown() -> None:
    messages = [{"role": ["user"], "content": "a"}]
    assert reason_of(encode_conversation, TOKENIZER, messages, end_ids=ENDS) == chat.UNKNOWN_ROLE


def test_template_that_rewrites_earlier_turns_is_rejected() -> None:
    tokenizer = byte_tokenizer(REWRITING_TEMPLATE)
    one = [message("user", "a"), message("assistant", "thought#b")]
    assert encode_conversation(tokenizer, one, end_ids=ENDS).responses
    two = [*one, message("user", "c"), message("assistant", "d")]
    assert reason_of(encode_conversation, tokenizer, two, end_ids=ENDS) == chat.REWRITTEN_TURNS


@pytest.mark.parametrize(
    "body", ["{{ raise_exception('no system turn') }}", "{{ messages[9]['role'] }}", "{{ 1 + 'a' }}"]
)
def test_template_that_refuses_is_a_reason(body: str) -> None:
    assert reason_of(encode_conversation, byte_tokenizer(body), TURNS, end_ids=ENDS) == chat.TEMPLATE_REFUSES


def test_empty_final_answer_is_an_end_token_when_allowed() -> None:
    turns = [message("user", "a"), message("assistant", "")]
    assert reason_of(encode_conversation, TOKENIZER, turns, end_ids=ENDS) == chat.EMPTY_CONTENT
    conversation = encode_conversation(TOKENIZER, turns, end_ids=ENDS, allow_empty_answer=True)
    start, end = conversation.responses[0]
    assert conversation.token_ids[start:end] == [END_ID]
    pair = encode_pair(TOKENIZER, "a", "", prompt_format="raw", end_ids=ENDS, allow_empty_answer=True)
    assert pair.token_ids[-1] == END_ID
    assert pair.responses == [(2, 3)]
    earlier = [*turns, *TURNS[1:3]]
    assert (
        reason_of(encode_conversation, TOKENIZER, earlier, end_ids=ENDS, allow_empty_answer=True) == chat.EMPTY_CONTENT
    )


@pytest.mark.parametrize(
    ("prompt", "reason"), [(None, chat.NULL_CONTENT), ("", chat.EMPTY_CONTENT), (5, chat.WRONG_TYPE)]
)
@pytest.mark.parametrize("prompt_format", ["chat", "raw"])
def test_bad_prompts(prompt: Any, reason: str, prompt_format: Any) -> None:
    assert reason_of(encode_pair, TOKENIZER, prompt, "b", prompt_format=prompt_format, end_ids=ENDS) == reason
    assert reason_of(encode_prompt, TOKENIZER, prompt, prompt_format=prompt_format, end_ids=ENDS) == reason


def test_prompt_must_not_end_with_an_answer() -> None:
    assert reason_of(encode_prompt, TOKENIZER, TURNS, prompt_format="chat", end_ids=ENDS) == chat.NO_PROMPT


def test_missing_chat_template_is_the_users_to_fix() -> None:
    with pytest.raises(InputError, match="chat template"):
        encode_conversation(byte_tokenizer(None), TURNS, end_ids=ENDS)


def test_truncation_cuts_the_last_answer() -> None:
    conversation = Conversation(list(range(10)), [(2, 4), (6, 10)])
    assert fit_to_length(conversation, 10, "reject") is conversation
    assert fit_to_length(conversation, 8, "truncate") == Conversation(list(range(8)), [(2, 4), (6, 8)])
    assert fit_to_length(conversation, 6, "truncate") == Conversation(list(range(6)), [(2, 4)])
    assert reason_of(fit_to_length, conversation, 2, "truncate") == chat.NO_LABEL_LEFT
    assert reason_of(fit_to_length, conversation, 9, "reject") == chat.TOO_LONG
