"""Messages to token ids and response spans, and prompts to token ids: one code for training data and for inference.

A conversation is rendered by prefixes: `messages[:i]` with the generation prompt, then `messages[:i + 1]`. What the
second adds to the first, up to its end-of-turn token, is the response; the rest is prompt. Each such segment is
tokenized on its own and without the tokenizer's own special tokens (the template writes its BOS itself), so the ids in
front of a response in training are the ids that a server computes for the same turns, by construction. Special tokens
spelled out in a content become those ids, and nothing here or later tells padding from text by its id.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

from workers.config import PromptFormat
from workers.errors import InputError

ROLES = ("system", "user", "assistant", "tool")

NO_ASSISTANT_TURN = "no assistant turn"
NO_PROMPT = "no turn before the answer"
UNKNOWN_ROLE = "unknown role"
NULL_CONTENT = "null content"
EMPTY_CONTENT = "empty content"
WRONG_TYPE = "wrong type"
INVALID_TEXT = "invalid text"
MISSING_COLUMN = "missing column"
MASK_AMONG_TOKENS = "mask id among the tokens"
NO_LABEL_LEFT = "no label left after truncation"
MALFORMED_LINE = "malformed JSON line"
NOT_UTF_8 = "not UTF-8"
UNREADABLE_ROW = "unreadable row"
TOO_LONG = "longer than the limit"
REWRITTEN_TURNS = "template rewrites earlier turns"
TEMPLATE_REFUSES = "template refuses the messages"
REJECTION_REASONS = (
    NO_ASSISTANT_TURN,
    NO_PROMPT,
    UNKNOWN_ROLE,
    NULL_CONTENT,
    EMPTY_CONTENT,
    WRONG_TYPE,
    INVALID_TEXT,
    MISSING_COLUMN,
    MASK_AMONG_TOKENS,
    NO_LABEL_LEFT,
    MALFORMED_LINE,
    NOT_UTF_8,
    UNREADABLE_ROW,
    TOO_LONG,
    REWRITTEN_TURNS,
    TEMPLATE_REFUSES,
)


class Rejected(Exception):  # noqa: N818 - a verdict on one row, not a fault of the program
    """This row cannot be used; `reason` is one of `REJECTION_REASONS`, `detail` says what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REJECTION_REASONS, reason
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Conversation:
    """Token ids, and the half-open token spans of the assistant turns, their end-of-turn tokens included."""

    token_ids: list[int]
    responses: list[tuple[int, int]]


def check_prompt_format(tokenizer: Any, prompt_format: PromptFormat, where: str) -> None:
    """Refuses the chat format for a tokenizer without a chat template. `where` is the name of the setting."""
    if prompt_format == "chat" and not tokenizer.chat_template:
        advice = "Use `raw`, or a tokenizer with a chat template."
        raise InputError(where, "`chat`, but the tokenizer has no chat template", "a chat template", advice)


def encode_conversation(
    tokenizer: Any, messages: Any, *, end_ids: frozenset[int], allow_empty_answer: bool = False
) -> Conversation:
    """The tokens of a conversation, up to the end of its last assistant turn.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: a list of `{role, content}`; further keys are handed to the template.
        end_ids: the ids that end a turn. A turn whose template writes none gets the tokenizer's eos id.
        allow_empty_answer: accept a final assistant turn without content.

    Raises:
        Rejected: the row cannot be used.
        InputError: no chat template, or no way to end a turn.
    """
    check_prompt_format(tokenizer, "chat", "prompt_format")
    turns = _checked_turns(messages, allow_empty_answer)
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise Rejected(NO_ASSISTANT_TURN, f"{len(turns)} messages")
    token_ids, responses, _ = _encode_turns(tokenizer, turns[: answers[-1] + 1], end_ids)
    return Conversation(token_ids, responses)


def encode_pair(
    tokenizer: Any,
    prompt: Any,
    response: Any,
    *,
    prompt_format: PromptFormat,
    end_ids: frozenset[int],
    allow_empty_answer: bool = False,
) -> Conversation:
    """The tokens of one prompt and its response: as two chat turns, or joined as they are (`raw`) with an eos id behind.

    Raises:
        Rejected: the row cannot be used.
        InputError: `chat` without a chat template, or no way to end a turn.
    """
    if prompt_format == "chat":
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return encode_conversation(tokenizer, messages, end_ids=end_ids, allow_empty_answer=allow_empty_answer)
    token_ids = _raw_prompt_ids(tokenizer, _checked_text(prompt, "prompt", may_be_empty=False))
    answer = _checked_text(response, "response", may_be_empty=allow_empty_answer)
    answer_ids = _end_turn(tokenizer, _tokenize(tokenizer, answer), end_ids)
    return Conversation(token_ids + answer_ids, [(len(token_ids), len(token_ids) + len(answer_ids))])


def encode_prompt(
    tokenizer: Any, messages_or_prompt: Any, *, prompt_format: PromptFormat, end_ids: frozenset[int]
) -> list[int]:
    """The very ids that training puts in front of the response to these messages, or to this prompt.

    A string is one user turn in the chat format; in the raw format it gets what the tokenizer puts in front (BOS) and
    nothing behind it.

    Raises:
        Rejected: nothing can be generated for this row.
        InputError: `chat`, or messages, without a chat template.
    """
    if not isinstance(messages_or_prompt, (list, tuple)):
        prompt = _checked_text(messages_or_prompt, "prompt", may_be_empty=False)
        if prompt_format == "raw":
            return _raw_prompt_ids(tokenizer, prompt)
        messages_or_prompt = [{"role": "user", "content": prompt}]
    check_prompt_format(tokenizer, "chat", "prompt_format")
    turns = _checked_turns(messages_or_prompt, allow_empty_answer=False)
    if not turns or turns[-1]["role"] == "assistant":
        raise Rejected(NO_PROMPT, "the last message is the assistant's" if turns else "no messages")
    token_ids, _, written = _encode_turns(tokenizer, turns, end_ids)
    opening = _render(tokenizer, turns, add_generation_prompt=True)
    return token_ids + _tokenize(tokenizer, _added_text(written, opening))


def fit_to_length(conversation: Conversation, max_length: int, too_long: Literal["reject", "truncate"]) -> Conversation:
    """A conversation of at most `max_length` tokens, cut at its end; a response that is cut loses its end-of-turn token.

    Raises:
        Rejected: longer than the limit, or no response token is left.
    """
    num_tokens = len(conversation.token_ids)
    if num_tokens <= max_length:
        return conversation
    if too_long == "reject":
        raise Rejected(TOO_LONG, f"{num_tokens} tokens, the limit is {max_length}")
    responses = [(start, min(end, max_length)) for start, end in conversation.responses if start < max_length]
    if not responses:
        first = conversation.responses[0][0]
        raise Rejected(NO_LABEL_LEFT, f"the first answer begins at token {first}, the limit is {max_length}")
    return Conversation(conversation.token_ids[:max_length], responses)


def _checked_turns(messages: Any, allow_empty_answer: bool) -> list[dict[str, Any]]:
    """The messages as plain dictionaries without null fields, once each has a known role and a text."""
    if messages is None:
        raise Rejected(NULL_CONTENT, "messages is null")
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise Rejected(WRONG_TYPE, f"messages is {type(messages).__name__}, not a list")
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise Rejected(WRONG_TYPE, f"message {index} is {type(message).__name__}, not an object")
        turn = {key: value for key, value in message.items() if value is not None}
        if turn.get("role") not in ROLES:
            raise Rejected(UNKNOWN_ROLE, f"message {index} has role {turn.get('role')!r}")
        is_last_answer = turn["role"] == "assistant" and index == len(messages) - 1
        name = f"content of message {index}"
        turn["content"] = _checked_text(turn.get("content"), name, may_be_empty=allow_empty_answer and is_last_answer)
        turns.append(turn)
    return turns


def _checked_text(value: Any, name: str, *, may_be_empty: bool) -> str:
    if value is None:
        raise Rejected(NULL_CONTENT, f"{name} is null")
    if not isinstance(value, str):
        raise Rejected(WRONG_TYPE, f"{name} is {type(value).__name__}, not text")
    if not value.strip() and not may_be_empty:
        raise Rejected(EMPTY_CONTENT, f"{name} is empty or blank")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell and no tokenizer takes
        raise Rejected(INVALID_TEXT, f"{name}: {error.reason} at character {error.start}") from error
    return value


def _encode_turns(
    tokenizer: Any, turns: list[dict[str, Any]], end_ids: frozenset[int]
) -> tuple[list[int], list[tuple[int, int]], str]:
    """Token ids and response spans up to the end of the last assistant turn, and the text that those ids stand for."""
    token_ids: list[int] = []
    responses: list[tuple[int, int]] = []
    written = ""
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        if index == 0:
            raise Rejected(NO_PROMPT, "the first message is the assistant's")
        opening = _render(tokenizer, turns[:index], add_generation_prompt=True)
        token_ids += _tokenize(tokenizer, _added_text(written, opening))
        if not token_ids:
            raise Rejected(EMPTY_CONTENT, "the prompt has no tokens")
        closed = _render(tokenizer, turns[: index + 1], add_generation_prompt=False)
        answer = _until_end_of_turn(tokenizer, _added_text(opening, closed), turn["content"], end_ids)
        answer_ids = _end_turn(tokenizer, _tokenize(tokenizer, answer), end_ids)
        responses.append((len(token_ids), len(token_ids) + len(answer_ids)))
        token_ids += answer_ids
        written = opening + answer
    return token_ids, responses, written


def _render(tokenizer: Any, turns: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # a template is a program
        raise Rejected(TEMPLATE_REFUSES, str(error)) from error


def _added_text(before: str, after: str) -> str:
    """What a longer rendering adds to a shorter one, which must be its beginning."""
    if after.startswith(before):
        return after[len(before) :]
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    raise Rejected(REWRITTEN_TURNS, f"{before[same : same + 40]!r} became {after[same : same + 40]!r}")


def _until_end_of_turn(tokenizer: Any, turn_text: str, content: str, end_ids: frozenset[int]) -> str:
    """The rendered turn up to its end-of-turn token.

    What the template writes behind it (a line break) belongs to the next prompt. End tokens that the content itself
    spells out are passed over. A turn without an end-of-turn token is all answer.
    """
    if not end_ids:
        return turn_text
    pattern = re.compile("|".join(re.escape(tokenizer.convert_ids_to_tokens(end_id)) for end_id in sorted(end_ids)))
    num_inside = len(pattern.findall(content))
    ends = [match.end() for match in pattern.finditer(turn_text)]
    return turn_text[: ends[num_inside]] if len(ends) > num_inside else turn_text


def _end_turn(tokenizer: Any, answer_ids: list[int], end_ids: frozenset[int]) -> list[int]:
    if answer_ids and answer_ids[-1] in end_ids:
        return answer_ids
    if tokenizer.eos_token_id is None:
        raise InputError("tokenizer", "no eos token, and a turn without an end-of-turn token", "a way to end a turn")
    return [*answer_ids, tokenizer.eos_token_id]


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _raw_prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt with what the tokenizer puts in front, without what it puts behind: an eos there would end the text."""
    plain = _tokenize(tokenizer, prompt)
    full = list(tokenizer(prompt, add_special_tokens=True, verbose=False)["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            full = full[: start + len(plain)]
            break
    if not full:
        raise Rejected(EMPTY_CONTENT, "the prompt has no tokens")
    return full
