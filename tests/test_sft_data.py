"""Preparation with Ray Data: good rows, rejected rows with locations, the share that stops a run, reuse and resume."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import END_ID, MASK_ID, byte_tokenizer

from pipelines import preparation_tasks, sft_data, sft_rows
from pipelines.preparation_tasks import Task
from pipelines.sft_data import PreparedIndex, prepare_sft_data
from workers import chat
from workers.chat import encode_conversation
from workers.config import DataSettings
from workers.errors import InputError

ENDS = frozenset([END_ID])
pytestmark = pytest.mark.usefixtures("ray_session")


def turns(question: str, answer: str | None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def write_lines(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def prepare(folder: Path, tokenizer_folder: str, **options: Any) -> PreparedIndex:
    settings = DataSettings(train=(str(folder / "in"),), **options)
    return prepare_sft_data(
        settings, tokenizer_folder=tokenizer_folder, mask_token_id=MASK_ID, end_ids=ENDS, output=str(folder / "out")
    )


def watch_tasks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The shards that each later run of tasks works on."""
    runs: list[list[str]] = []
    run_tasks = sft_data.run_tasks

    def watched(preparation: Any, tasks: list[Task]) -> Any:
        if tasks:
            runs.append([Path(task.shard.path).name for task in tasks])
        return run_tasks(preparation, tasks)

    monkeypatch.setattr(sft_data, "run_tasks", watched)
    return runs


def rejected_rows(folder: Path) -> list[tuple[str, int, str]]:
    tables = [pq.read_table(path) for path in sorted((folder / "out" / "rejected").iterdir())]
    return [(Path(row["path"]).name, row["row"], row["reason"]) for row in pa.concat_tables(tables).to_pylist()]


def prepared_rows(index: PreparedIndex) -> list[dict[str, Any]]:
    return [row for part in index.parts for row in pq.read_table(part.path).to_pylist()]


def test_bad_rows_are_listed_with_their_places_and_cost_no_good_row(tmp_path: Path, tokenizer_folder: str) -> None:
    good = turns("2+3", "5")
    write_lines(
        tmp_path / "in" / "a.jsonl",
        [
            good,
            "{oops",
            turns("a", None),
            turns("a", "x" * 40),
            good,
            turns("say <|mask|>", "b"),
            {"prompt": "a"},
            good,
        ],
    )
    pq.write_table(pa.Table.from_pylist([good, turns("é\n", " "), good]), tmp_path / "in" / "b.parquet")
    write_lines(tmp_path / "in" / "c.jsonl", [turns("a", "\ud800"), turns("\ud800", "b")])
    index = prepare(tmp_path, tokenizer_folder, max_rejected_share=0.8, max_length=32, too_long="reject")
    conversation = encode_conversation(byte_tokenizer(), good["messages"], end_ids=ENDS)
    places = [(0, 0), (0, 4), (0, 7), (1, 0), (1, 2)]
    assert prepared_rows(index) == [
        {"file": file, "row": row, "token_ids": conversation.token_ids, "starts": [start], "ends": [end]}
        for file, row in places
        for start, end in conversation.responses
    ]
    assert rejected_rows(tmp_path) == [
        ("a.jsonl", 1, chat.MALFORMED_LINE),
        ("a.jsonl", 2, chat.NULL_CONTENT),
        ("a.jsonl", 3, chat.TOO_LONG),
        ("a.jsonl", 5, chat.MASK_AMONG_TOKENS),
        ("a.jsonl", 6, chat.MISSING_COLUMN),
        ("b.parquet", 1, chat.EMPTY_CONTENT),
        ("c.jsonl", 0, chat.INVALID_TEXT),
        ("c.jsonl", 1, chat.INVALID_TEXT),
    ]
    assert (index.num_rows, index.num_rejected, sum(index.reasons.values())) == (5, 8, 8)
    assert index.reasons[chat.INVALID_TEXT] == 2
    length = len(conversation.token_ids)
    assert [(p.num_rows, p.num_tokens, p.num_response_tokens) for p in index.parts] == [
        (3, 3 * length, 6),
        (2, 2 * length, 4),
    ]
    assert [Path(path).name for path in index.files] == ["a.jsonl", "b.parquet", "c.jsonl"]


def test_prompts_that_leave_no_label_stop_the_run(tmp_path: Path, tokenizer_folder: str) -> None:
    """A 40-token prompt and a limit of 32: such rows must never be trained on with a loss of 0.0."""
    write_lines(tmp_path / "in" / "a.jsonl", [turns("x" * 40, "abc")] * 3)
    with pytest.raises(InputError) as caught:
        prepare(tmp_path, tokenizer_folder, max_length=32)
    assert "3 of 3 rows of data.train rejected" in str(caught.value)
    assert f"3  {chat.NO_LABEL_LEFT}" in str(caught.value)
    assert rejected_rows(tmp_path) == [("a.jsonl", row, chat.NO_LABEL_LEFT) for row in range(3)]
    with pytest.raises(InputError, match="at least one good row"):
        prepare(tmp_path, tokenizer_folder, max_length=32, max_rejected_share=1.0)


def test_empty_final_answer_is_rejected_unless_allowed(tmp_path: Path, tokenizer_folder: str) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [turns("a", ""), turns("a", "b")])
    with pytest.raises(InputError, match=chat.EMPTY_CONTENT):
        prepare(tmp_path, tokenizer_folder)
    index = prepare(tmp_path, tokenizer_folder, allow_empty_answer=True)
    first = prepared_rows(index)[0]
    assert first["token_ids"][first["starts"][0] : first["ends"][0]] == [END_ID]
    assert index.num_rejected == 0
    assert not (tmp_path / "out" / "rejected").exists(), "left over from the earlier settings"


def test_share_of_rejected_rows_is_checked_again_on_reuse(tmp_path: Path, tokenizer_folder: str) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [turns("a", "b"), "{oops"])
    prepare(tmp_path, tokenizer_folder, max_rejected_share=0.5)
    with pytest.raises(InputError, match=r"data.max_rejected_share: found 1 of 2 rows"):
        prepare(tmp_path, tokenizer_folder, max_rejected_share=0.4)


def test_same_input_is_reused_and_other_input_is_not(
    tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [turns("a", "b")] * 3)
    first = prepare(tmp_path, tokenizer_folder)
    runs = watch_tasks(monkeypatch)
    assert prepare(tmp_path, tokenizer_folder, shuffle_window=7) == first
    assert runs == []
    write_lines(tmp_path / "in" / "a.jsonl", [turns("a", "c")] * 3)
    second = prepare(tmp_path, tokenizer_folder)
    assert runs == [["a.jsonl"]]
    assert second.fingerprint != first.fingerprint
    assert prepared_rows(second) != []
    assert prepare(tmp_path, tokenizer_folder, max_length=100).fingerprint != second.fingerprint


def test_interrupted_preparation_goes_on_with_what_is_missing(
    tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write_lines(tmp_path / "in" / f"{name}.jsonl", [turns(name, "b")] * 2)
    whole = prepare(tmp_path, tokenizer_folder)
    (tmp_path / "out" / "index.json").unlink()
    (tmp_path / "out" / "done" / "00001-00000.json").unlink()
    runs = watch_tasks(monkeypatch)
    assert prepare(tmp_path, tokenizer_folder) == whole
    assert runs == [["b.jsonl"]]


def test_progress_counts_shards(tmp_path: Path, tokenizer_folder: str) -> None:
    for name in "ab":
        write_lines(tmp_path / "in" / f"{name}.jsonl", [turns(name, "b")])
    calls: list[tuple[int, int]] = []
    prepare_sft_data(
        DataSettings(train=(str(tmp_path / "in"),)),
        tokenizer_folder=tokenizer_folder,
        mask_token_id=None,
        end_ids=ENDS,
        output=str(tmp_path / "out"),
        report=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(0, 2), (1, 2), (2, 2)]


def test_damaged_shard_is_an_input_error_that_names_it(tmp_path: Path, tokenizer_folder: str) -> None:
    lines = "".join(json.dumps(turns(os.urandom(30).hex(), "b")) + "\n" for _ in range(2000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-2000])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: found unreadable from line"):
        prepare(tmp_path, tokenizer_folder)


def test_chat_format_needs_a_template(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [turns("a", "b")])
    byte_tokenizer(None).save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match=r"data\.prompt_format.*no chat template"):
        prepare(tmp_path, str(tmp_path / "plain"))


def test_parts_are_cut_by_rows_and_by_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_rows, "PART_ROWS", 3)
    monkeypatch.setattr(sft_rows, "PART_TOKENS", 10)
    with sft_rows.PartWriter(str(tmp_path), "00007-00000", 7) as writer:
        for row, length in enumerate([1, 1, 1, 9, 9, 2]):
            writer.add(row, chat.Conversation([5] * length, [(0, 1)]))
    assert [part["num_rows"] for part in writer.written] == [3, 2, 1]
    tables = [pq.read_table(tmp_path / part["path"]) for part in writer.written]
    assert pa.concat_tables(tables)["row"].to_pylist() == list(range(6))


def test_a_large_parquet_file_is_prepared_by_several_tasks_with_the_same_rows(
    tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single huge file once kept all cores but one idle."""
    rows = [turns(f"{i}", None if i % 7 == 3 else "b") for i in range(40)]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "a.parquet", row_group_size=5)
    write_lines(tmp_path / "in" / "b.jsonl", rows)
    whole = prepare(tmp_path, tokenizer_folder, max_rejected_share=0.2)
    expected, rejected = prepared_rows(whole), rejected_rows(tmp_path)
    for path in (tmp_path / "out").glob("*.json"):
        path.unlink()
    metadata = pq.ParquetFile(tmp_path / "in" / "a.parquet").metadata
    largest = max(metadata.row_group(group).total_byte_size for group in range(8))
    monkeypatch.setattr(preparation_tasks, "TASK_BYTES", largest + 1)
    runs = watch_tasks(monkeypatch)
    calls: list[tuple[int, int]] = []
    index = prepare_sft_data(
        DataSettings(train=(str(tmp_path / "in"),), max_rejected_share=0.2),
        tokenizer_folder=tokenizer_folder,
        mask_token_id=MASK_ID,
        end_ids=ENDS,
        output=str(tmp_path / "out"),
        report=lambda done, total: calls.append((done, total)),
    )
    assert runs == [["a.parquet"] * 4 + ["b.jsonl"]]
    assert prepared_rows(index) == expected
    assert rejected_rows(tmp_path) == rejected
    assert (index.reasons, index.num_rows, index.files) == (whole.reasons, whole.num_rows, whole.files)
    assert [part.file for part in index.parts] == [0] * 4 + [1]
    assert calls[0] == (0, 2)
    assert calls[-1] == (2, 2)
    (tmp_path / "out" / "index.json").unlink()
    (tmp_path / "out" / "done" / "00000-00002.json").unlink()
    assert prepare(tmp_path, tokenizer_folder, max_rejected_share=0.2) == index
    assert runs[1:] == [["a.parquet"]]
