"""Every reason for a rejection, from a raw file to its place in `rejected/`; one bad row costs no other."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import END_ID, MASK_ID, REWRITING_TEMPLATE, byte_tokenizer
from prepared_shards import ENDS, prepare_here, turns, write_lines
from stream_plans import index_of

from pipelines.sft_data import PreparedIndex, check_rejected
from pipelines.sft_rows import encode_row
from workers import chat
from workers.chat import Rejected
from workers.config import DataSettings
from workers.errors import InputError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
# Reason, the row, and the settings that differ from the defaults of these tests.
BAD_ROWS: list[tuple[str, Any, dict[str, Any]]] = [
    (chat.NO_ASSISTANT_TURN, {"messages": [USER]}, {}),
    (chat.NO_ASSISTANT_TURN, {"messages": []}, {}),
    (chat.NO_PROMPT, {"messages": [ANSWER]}, {}),
    (chat.UNKNOWN_ROLE, {"messages": [USER, {"role": "narrator", "content": "b"}]}, {}),
    (chat.NULL_CONTENT, turns("a", None), {}),
    (chat.NULL_CONTENT, {"messages": None}, {}),
    (chat.NULL_CONTENT, {"prompt": "a", "response": None}, {}),
    (chat.EMPTY_CONTENT, turns(" \n", "b"), {}),
    (chat.EMPTY_CONTENT, turns("a", ""), {}),
    (chat.EMPTY_CONTENT, turns("", "b"), {"allow_empty_answer": True}),
    (chat.WRONG_TYPE, {"messages": "a"}, {}),
    (chat.WRONG_TYPE, turns("a", 5), {}),
    (chat.WRONG_TYPE, {"prompt": "a", "response": ["b"]}, {}),
    (chat.INVALID_TEXT, turns("a", "\ud800"), {}),
    (chat.MISSING_COLUMN, {"prompt": "a"}, {}),
    (chat.MISSING_COLUMN, {}, {}),
    (chat.MASK_AMONG_TOKENS, turns("say <|mask|>", "b"), {}),
    (chat.MASK_AMONG_TOKENS, turns("a", "<|mask|>"), {}),
    (chat.NO_LABEL_LEFT, turns("x" * 40, "abc"), {"max_length": 32}),
    (chat.TOO_LONG, turns("a", "x" * 40), {"max_length": 32, "too_long": "reject"}),
    (chat.MALFORMED_LINE, "{oops", {}),
    (chat.MALFORMED_LINE, "[1]", {}),
    (chat.MALFORMED_LINE, "null", {}),
    (
        chat.REWRITTEN_TURNS,
        {"messages": [USER, {**ANSWER, "content": "c#b"}, USER, ANSWER]},
        {"template": REWRITING_TEMPLATE},
    ),
    (chat.TEMPLATE_REFUSES, {"messages": [{"role": "tool", "content": "a"}, ANSWER]}, {"template": "refusing"}),
]
REFUSING_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("reason", "row", "options"), BAD_ROWS)
def test_a_bad_row_is_listed_with_its_place_and_costs_no_other(
    tmp_path: Path, tokenizer_folder: str, reason: str, row: Any, options: dict[str, Any]
) -> None:
    options = dict(options)
    if template := options.pop("template", None):
        tokenizer_folder = str(tmp_path / "tokenizer")
        byte_tokenizer(REFUSING_TEMPLATE if template == "refusing" else template).save_pretrained(tokenizer_folder)
    good = turns("2+3", "5")
    write_lines(tmp_path / "in" / "a.jsonl", [good, "", row, good])
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder, **options)
    assert [each["row"] for each in prepared] == [0, 3]
    (listed,) = rejected
    path = str(tmp_path / "in" / "a.jsonl")
    assert (listed["path"], listed["row"], listed["location"]) == (path, 2, f"{path} line 3")
    assert listed["reason"] == reason
    assert listed["detail"]


def test_a_detail_is_short_whatever_the_row_has(tmp_path: Path, tokenizer_folder: str) -> None:
    """A role of a megabyte would stand in `rejected/`, and thousands of them in memory."""
    write_lines(tmp_path / "in" / "a.jsonl", [{"messages": [{"role": "x" * 2**20, "content": "a"}]}])
    _, (listed,) = prepare_here(tmp_path, tokenizer_folder)
    assert listed["reason"] == chat.UNKNOWN_ROLE
    assert "'xxx" in listed["detail"]
    assert len(listed["detail"]) == 500


def test_every_reason_has_a_row_here() -> None:
    elsewhere = {chat.UNREADABLE_ROW, chat.NOT_UTF_8}  # rows that are no JSON; the second in `test_input_faults`
    covered = {reason for reason, _, _ in BAD_ROWS} | elsewhere
    assert covered == set(chat.REJECTION_REASONS)


def test_a_parquet_row_that_python_cannot_hold_is_an_unreadable_row(tmp_path: Path, tokenizer_folder: str) -> None:
    """It was called a malformed JSON line."""
    texts = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"], pa.binary()).buffers())
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    pq.write_table(pa.table({"prompt": texts, "response": ["x", "y", "z"]}), path, row_group_size=2)
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert [each["row"] for each in prepared] == [0, 2]
    assert [(each["row"], each["location"], each["reason"]) for each in rejected] == [
        (1, f"{path} row 1", chat.UNREADABLE_ROW)
    ]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.07, 0.29, 0.5, 0.57, 1.0])
def test_the_border_of_the_rejected_share_is_allowed_and_one_row_more_is_not(share: float) -> None:
    """In floating point 0.29 of 100 rows are less than 29."""
    border = round(100 * share)

    def index(num_rejected: int) -> PreparedIndex:
        return replace(
            index_of([100 - num_rejected]), num_rejected=num_rejected, reasons={"null content": num_rejected}
        )

    settings = DataSettings(max_rejected_share=share)
    if border < 100:
        check_rejected(index(border), settings, "out", "data.train")
        with pytest.raises(InputError, match=r"data\.max_rejected_share: found .* of 100 rows of data\.train rejected"):
            check_rejected(index(border + 1), settings, "out", "data.train")
    else:
        check_rejected(index(99), settings, "out", "data.train")
        with pytest.raises(InputError, match=r"data\.held_out: found 100 of 100 (.|\n)*at least one good row"):
            check_rejected(index(100), settings, "out", "data.held_out")


TEXTS = (
    "a",
    "",
    " ",
    "\n",
    "<|end|>",
    "<|mask|>",
    "<|user|>",
    "\x00",
    "é",
    "\ud800",
    "😀" * 3,
    "x" * 60,
    "system",
    "2+3",
)
SCALARS = (None, True, 0, -1, 2**70, 1.5, float("nan"), b"\xff", *TEXTS)


def fuzzed(rng: random.Random, depth: int = 0) -> Any:
    """A value, often a text or something that looks like messages."""
    kind = rng.random()
    if depth and kind < 0.7:
        return "2+3"
    if kind < 0.4 or depth > 3:
        return rng.choice(TEXTS if rng.random() < 0.9 else SCALARS)
    if kind < 0.5:
        return [fuzzed(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 0.6:
        return {str(rng.choice(SCALARS)): fuzzed(rng, depth + 1) for _ in range(rng.randrange(4))}
    roles = [rng.choice(("system", "user", "assistant", "tool")) for _ in range(rng.randrange(5))]
    return [{"role": role, "content": fuzzed(rng, 4 if rng.random() < 0.9 else depth + 1)} for role in roles]


def test_any_row_is_encoded_or_rejected_for_a_known_reason() -> None:
    """No row may stop a run; what is encoded has labels inside it, and no placeholder."""
    rng = random.Random(0)
    tokenizer = byte_tokenizer()
    num_encoded = 0
    for _ in range(2000):
        names = rng.choice(
            [("messages",), ("prompt", "response"), ("messages", "prompt", "response"), ("prompt", "other")]
        )
        row = {name: fuzzed(rng, depth=name != "messages") for name in names}
        settings = DataSettings(
            prompt_format="raw" if rng.random() < 0.3 else "chat",
            max_length=rng.choice((2, 8, 20, 60, 400)),
            too_long="reject" if rng.random() < 0.3 else "truncate",
            allow_empty_answer=rng.random() < 0.5,
        )
        try:
            conversation = encode_row(tokenizer, row, settings, mask_token_id=MASK_ID, end_ids=ENDS)
        except Rejected:  # which takes known reasons only
            continue
        num_encoded += 1
        length = len(conversation.token_ids)
        assert length <= settings.max_length
        assert MASK_ID not in conversation.token_ids
        edges = [edge for span in conversation.responses for edge in span]
        assert edges == sorted(edges) and 0 < edges[0] < edges[-1] <= length
        assert all(start < end for start, end in conversation.responses)
        assert conversation.token_ids[edges[-1] - 1] == END_ID or length == settings.max_length
    assert num_encoded > 100
