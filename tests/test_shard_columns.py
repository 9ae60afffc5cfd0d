"""Shards that differ: what can be used is used, the differences are shown before the start, the rest is refused by name."""

import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import byte_tokenizer
from prepared_shards import prepare_here, turns, write_lines

from jobs import train_mars
from pipelines.sft_source import inspect_shards, iterate_texts
from workers import chat
from workers.config import DataSettings
from workers.errors import InputError

QUESTIONS, ANSWERS = ["2+3", "é", "a b"], ["5", "e", "c"]
ROLE, CONTENT = pa.field("role", pa.string()), pa.field("content", pa.string())
MESSAGES = [turns(*pair)["messages"] for pair in zip(QUESTIONS, ANSWERS, strict=True)]
TEXT_TYPES = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}


def pair_table(text: pa.DataType, **others: pa.Array) -> pa.Table:
    columns = {"prompt": pa.array(QUESTIONS).cast(text), "response": pa.array(ANSWERS).cast(text)}
    return pa.table({**others, **columns})


def dictionary_messages() -> pa.Array:
    flat = [turn for messages in MESSAGES for turn in messages]
    names = [pa.array([turn[key] for turn in flat]).dictionary_encode() for key in ("role", "content")]
    return pa.ListArray.from_arrays([0, 2, 4, 6], pa.StructArray.from_arrays(names, ["role", "content"]))


USABLE = {
    **{f"pair of {name}": pair_table(text) for name, text in TEXT_TYPES.items()},
    "pair and further columns": pair_table(pa.string(), id=pa.array([1, 2, 3]), messages_seen=pa.array([1.5, 2, 3])),
    "messages": pa.table({"messages": MESSAGES}),
    "messages beside prompts of integers": pa.table({"messages": MESSAGES, "prompt": [1, 2, 3], "response": [1, 2, 3]}),
    "pair beside null messages": pair_table(pa.string(), messages=pa.nulls(3)),
    "pair beside messages that are null in every row": pair_table(
        pa.string(), messages=pa.nulls(3, pa.list_(pa.struct([ROLE, CONTENT])))
    ),
    "large list, fields in another order": pa.table(
        {"messages": pa.array(MESSAGES, pa.large_list(pa.struct([CONTENT, ROLE])))}
    ),
    "list view": pa.table({"messages": pa.array(MESSAGES, pa.list_view(pa.struct([ROLE, CONTENT])))}),
    "list of fixed size": pa.table({"messages": pa.array(MESSAGES, pa.list_(pa.struct([ROLE, CONTENT]), 2))}),
    "messages of dictionaries": pa.table({"messages": dictionary_messages()}),
    "messages with further fields": pa.table(
        {"messages": pa.array(MESSAGES, pa.list_(pa.struct([pa.field("name", pa.string()), ROLE, CONTENT])))}
    ),
    "messages of large strings": pa.table(
        {
            "messages": pa.array(
                MESSAGES, pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))
            )
        }
    ),
}
REFUSED = {
    "integers": (pa.table({"prompt": [1, 2], "response": ["a", "b"]}), "column 'prompt'.*int64"),
    "bytes": (pa.table({"prompt": ["a"], "response": [b"b"]}), "column 'response'.*binary"),
    "lists of text": (pa.table({"prompt": [["a"]], "response": ["b"]}), "column 'prompt'.*list"),
    "messages as text": (pa.table({"messages": ["[]"]}), "column 'messages'.*string"),
    "messages without content": (pa.table({"messages": [[{"role": "user"}]]}), "role, content"),
    "contents of integers": (pa.table({"messages": [[{"role": "user", "content": 1}]]}), "role, content"),
    "contents in pieces": (pa.table({"messages": [[{"role": "user", "content": [{"text": "a"}]}]]}), "role, content"),
    "integers beside null messages": (
        pa.table({"messages": pa.nulls(1), "prompt": [1], "response": ["b"]}),
        "column 'prompt'.*int64",
    ),
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)


@pytest.mark.parametrize("name", USABLE)
def test_every_encoding_of_the_same_rows_gives_the_same_samples(
    tmp_path: Path, tokenizer_folder: str, name: str
) -> None:
    write(tmp_path / "in" / "a.parquet", USABLE[name])
    write_lines(tmp_path / "in" / "b.jsonl", [{"messages": messages} for messages in MESSAGES])
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert not rejected
    samples = [[row[key] for key in ("row", "token_ids", "starts", "ends")] for row in prepared]
    assert len(samples) == 6
    assert samples[:3] == samples[3:]
    assert sorted(iterate_texts(DataSettings(train=(str(tmp_path / "in"),)))) == sorted([*QUESTIONS, *ANSWERS] * 2)


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_that_holds_something_else_is_refused_with_the_name_of_the_shard(tmp_path: Path, name: str) -> None:
    table, words = REFUSED[name]
    write(tmp_path / "in" / "odd.parquet", table)
    write_lines(tmp_path / "in" / "a.jsonl", [turns("a", "b")])
    with pytest.raises(InputError, match=rf"odd\.parquet.*{words}"):
        inspect_shards(DataSettings(train=(str(tmp_path / "in"),)))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (pa.table({"messages": pa.nulls(2)}), chat.NULL_CONTENT),
        (pa.table({"prompt": pa.nulls(2), "response": ["a", "b"]}), chat.NULL_CONTENT),
        (pa.table({"messages": pa.array([[], []], pa.list_(pa.null()))}), chat.NO_ASSISTANT_TURN),
        (pa.table({"messages": [[{"role": "user", "content": None}]] * 2}), chat.NULL_CONTENT),
    ],
)
def test_a_column_of_nothing_but_nulls_rejects_its_rows_one_by_one(
    tmp_path: Path, tokenizer_folder: str, table: pa.Table, reason: str
) -> None:
    write(tmp_path / "in" / "a.parquet", table)
    write_lines(tmp_path / "in" / "b.jsonl", [turns("a", "b")])
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert [row["file"] for row in prepared] == [1]
    assert [(row["row"], row["reason"]) for row in rejected] == [(0, reason), (1, reason)]


def test_rows_of_both_kinds_in_one_file(tmp_path: Path, tokenizer_folder: str) -> None:
    rows = [turns("a", "b"), {"prompt": "a", "response": "b"}, {"messages": None, "prompt": "a", "response": "b"}]
    write_lines(tmp_path / "in" / "a.jsonl", rows)
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert not rejected
    assert [row["token_ids"] for row in prepared] == [prepared[0]["token_ids"]] * 3


@pytest.fixture
def mixed_folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write(tmp_path / "in" / f"{name}.parquet", USABLE["messages"])
    write(tmp_path / "in" / "d.parquet", pair_table(pa.large_string(), id=pa.array([1, 2, 3])))
    write_lines(tmp_path / "in" / "e.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": None, "response": "b"}])
    return tmp_path / "in"


def test_differences_are_one_table(mixed_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        shards = inspect_shards(DataSettings(train=(str(mixed_folder),)), log_differences=True)
    assert len(shards) == 5
    (message,) = [record.getMessage() for record in caplog.records]
    lines = message.splitlines()
    assert lines[0] == "the shards of data.train differ in their columns:"
    cells = [line.split(maxsplit=1) for line in lines[3:]]
    assert [count for count, _ in cells] == ["3", "1", "1"]
    for words, (_, line) in zip(
        (
            ["messages: list", "a.parquet"],
            ["prompt: large_string, response: large_string", "id", "d.parquet"],
            ["prompt: null or text, response: text", "-", "e.jsonl"],
        ),
        cells,
        strict=True,
    ):
        assert all(word in line for word in words)


def test_shards_that_agree_need_no_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", [turns("a", "b")])
    with caplog.at_level(logging.INFO):
        inspect_shards(DataSettings(train=(str(tmp_path),)), log_differences=True)
    assert not caplog.records


def test_a_dry_run_shows_the_differences(mixed_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = [f"data.train={mixed_folder}", f"run.output={mixed_folder.parent / 'run'}", "--dry-run"]
    with caplog.at_level(logging.INFO):
        assert train_mars.main(arguments) == 0
    assert sum("differ in their columns" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("asked", ["in", "in/*", "in/**/*.jsonl*"])
def test_packed_files_in_folders_and_globs(tmp_path: Path, tokenizer_folder: str, asked: str) -> None:
    line = json.dumps(turns("a", "b")).encode() + b"\n"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(line * 2))
    with pa.CompressedOutputStream(str(tmp_path / "in" / "b.JSONL.ZST"), "zstd") as out:
        out.write(line * 3)
    shards = inspect_shards(DataSettings(train=(str(tmp_path / asked),)))
    assert [Path(shard.path).name for shard in shards] == ["a.jsonl.gz", "b.JSONL.ZST"][
        : 1 if asked.endswith("l*") else 2
    ]
    prepared, _ = prepare_here(tmp_path, tokenizer_folder)
    assert [(row["file"], row["row"]) for row in prepared] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
