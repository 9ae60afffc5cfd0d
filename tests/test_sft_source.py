"""Raw shards: listing, schema checks with clear errors, and rows with their numbers."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import row_files
from pipelines.sft_source import (
    MalformedLine,
    Shard,
    inspect_shards,
    iterate_rows,
    iterate_texts,
    list_shards,
    list_sources,
)
from workers.config import DataSettings
from workers.errors import InputError

ROWS = [{"prompt": f"p{i}", "response": f"r{i}", "more": i} for i in range(5)]
PAIRS = [{"prompt": row["prompt"], "response": row["response"]} for row in ROWS]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def data(*paths: Path, **options: Any) -> DataSettings:
    return DataSettings(train=tuple(map(str, paths)), **options)


def rows_of(path: Path) -> list[tuple[int, Any]]:
    return list(iterate_rows(list_shards([str(path)])[0], data(path)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same rows in each kind of file, and files that are no shards."""
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(LINES)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "sub").mkdir()
    with pa.CompressedOutputStream(str(tmp_path / "sub" / "d.jsonl.zst"), "zstd") as out:
        out.write(LINES)
    (tmp_path / "README.md").write_text("no shard")
    (tmp_path / "_errors").mkdir()
    (tmp_path / "_errors" / "part.jsonl").write_bytes(LINES)
    return tmp_path


def test_every_kind_of_file_gives_the_same_rows(folder: Path) -> None:
    shards = inspect_shards(data(folder))
    assert [os.path.relpath(shard.path, folder) for shard in shards] == [
        "a.parquet",
        "b.jsonl",
        "c.jsonl.gz",
        "sub/d.jsonl.zst",
    ]
    for shard in shards:
        assert list(iterate_rows(shard, data(folder))) == list(enumerate(PAIRS))


def test_each_shard_is_listed_once_however_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file named by a folder and by a glob would be trained on twice."""
    monkeypatch.chdir(folder)
    paths = ["b.jsonl", str(folder / "*.jsonl"), str(folder / "sub" / ".." / "b.jsonl")]
    assert [shard.path for shard in list_shards(paths)] == [str(folder / "b.jsonl")]


def test_name_with_glob_characters_is_a_file_first(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_bytes(LINES)
    assert len(list_shards([str(tmp_path / "a[1].jsonl")])) == 1


def test_rows_keep_their_line_numbers_and_bad_lines_stay_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = b'{"prompt": "a", "response": "b"}'
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, b"", b"{oops", b"[1]", b'"\xff"', b"[" * 100_000, good]))
    rows = rows_of(path)
    assert [number for number, _ in rows] == [0, 2, 3, 4, 5, 6]
    assert [isinstance(row, MalformedLine) for _, row in rows] == [False, True, True, True, True, False]


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once stopped the whole job, although the rows after it were good."""
    monkeypatch.setattr(row_files, "MAX_LINE_BYTES", 40)
    good = b'{"prompt": "a", "response": "b"}'
    longest = good + b" " * (40 - len(good))
    path = write(tmp_path / "a.jsonl", b"\n".join([good, longest, longest + b"}", b"x" * 200, good, longest]))
    rows = rows_of(path)
    assert [number for number, _ in rows] == list(range(6))
    assert [isinstance(row, MalformedLine) for _, row in rows] == [False, False, True, True, False, False]


def test_a_line_that_nests_too_deep_is_one_bad_row(tmp_path: Path) -> None:
    """It once was read, and could not be pickled later."""

    def nested(levels: int) -> bytes:
        return b'{"prompt": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b', "response": "b"}'

    path = write(tmp_path / "a.jsonl", b"\n".join(map(nested, (100, 101, 500, 100_000, 2))))
    assert [isinstance(row, MalformedLine) for _, row in rows_of(path)] == [False, True, True, True, False]
    wide = write(tmp_path / "b.jsonl", json.dumps({"prompt": [[]] * 500, "response": "b"}).encode())
    assert not isinstance(rows_of(wide)[0][1], MalformedLine)


def test_a_parquet_row_that_python_cannot_hold_is_one_bad_row(tmp_path: Path) -> None:
    """One text that is no UTF-8, or one odd date, once stopped the whole job."""
    texts = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"], pa.binary()).buffers())
    dates = pa.array([0, 0, 2**31 - 1], pa.int32()).cast(pa.date32())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": texts, "response": dates}), path)
    rows = rows_of(path)
    assert [number for number, _ in rows] == [0, 1, 2]
    assert [isinstance(row, MalformedLine) for _, row in rows] == [False, True, True]
    assert list(iterate_texts(data(path))) == ["a"]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a"])] * 3
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "response", "prompt"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="a.parquet.*more than one column named 'prompt'"):
        inspect_shards(data(tmp_path))


def test_blank_files_and_byte_order_marks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf\n\r\n")
    assert rows_of(path) == []


@pytest.mark.parametrize(("name", "position"), [("a.parquet", "row 3"), ("a.jsonl.gz", "line 4")])
def test_locations_are_rows_of_parquet_and_lines_of_jsonl(name: str, position: str) -> None:
    assert Shard(name, 1, "v").location(3) == f"{name} {position}"


def test_a_glob_leaves_out_side_files(folder: Path) -> None:
    write(folder / "_side.jsonl", LINES)
    for pattern in ("*.jsonl", "**/*.jsonl"):
        assert [shard.path for shard in list_shards([str(folder / pattern)])] == [str(folder / "b.jsonl")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.one_of(st.none(), st.fixed_dictionaries({"prompt": st.text(), "response": st.text()})), min_size=1))
def test_any_rows_come_back_from_json_lines(tmp_path: Path, rows: list[dict[str, str] | None]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((json.dumps(row) if row else "") + "\n" for row in rows) + "\n")
    assert rows_of(path) == [(number, row) for number, row in enumerate(rows) if row]


def test_parquet_messages_come_back_as_lists_of_objects(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    pq.write_table(pa.table({"messages": [messages, None]}), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [(0, {"messages": messages}), (1, {"messages": None})]


def test_texts(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, 3]},
        {"messages": "no list"},
        {"prompt": "b", "response": "\ud800"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{oops\n")
    assert list(iterate_texts(data(tmp_path))) == ["a", "b"]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"", "empty file"),
        ("a.jsonl", b"", "empty file"),
        ("a.jsonl", b"\n \n", "blank lines"),
        ("a.jsonl.gz", gzip.compress(b""), "blank lines"),
        ("a.parquet", b"PAR1 but not really", "not a readable Parquet"),
        ("a.jsonl.gz", b"not gzip", "unreadable from line 1"),
        ("a.csv", b"prompt,response\n", "ends in"),
    ],
)
def test_bad_files_are_named_before_work_starts(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=words) as caught:
        inspect_shards(data(path))
    assert name in str(caught.value)


@pytest.mark.parametrize("path", ["nowhere", "nowhere.jsonl", "*.jsonl", "empty"])
def test_nothing_there(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="data.train") as caught:
        inspect_shards(data(tmp_path / path))
    assert path in caught.value.found


def test_no_paths() -> None:
    with pytest.raises(InputError, match="at least one"):
        list_shards([])


def test_parquet_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PAIRS).slice(0, 0), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="without rows"):
        inspect_shards(data(tmp_path))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_wrong_columns_name_what_was_found_and_the_settings(tmp_path: Path, name: str) -> None:
    row = {"question": "a", "answer": "b"}
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / name)
    else:
        (tmp_path / name).write_text(json.dumps(row))
    with pytest.raises(InputError) as caught:
        inspect_shards(data(tmp_path))
    for words in (name, "question", "answer", "data.messages_column", "data.prompt_column", "data.response_column"):
        assert words in str(caught.value)
    mapped = data(tmp_path, prompt_column="question", response_column="answer")
    assert list(iterate_rows(inspect_shards(mapped)[0], mapped)) == [(0, row)]


@pytest.mark.parametrize("values", [["text"], [["a"]], [[{"from": "user", "value": "a"}]]])
def test_messages_of_another_type(tmp_path: Path, values: list[Any]) -> None:
    pq.write_table(pa.table({"messages": values}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="role, content"):
        inspect_shards(data(tmp_path))


def test_file_that_breaks_off_says_where(tmp_path: Path) -> None:
    lines = b"".join(
        json.dumps({"prompt": os.urandom(30).hex(), "response": "b"}).encode() + b"\n" for _ in range(2000)
    )
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(lines)[:-2000])
    assert inspect_shards(data(path))
    with pytest.raises(InputError, match=r"unreadable from line 1\d\d\d on"):
        rows_of(path)


def test_a_few_bad_lines_are_left_to_the_rejection_share(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"{oops\n" * 20)
    assert inspect_shards(data(path)) == list_shards([str(path)])
    assert isinstance(inspect_shards(data(path))[0], Shard)


def test_a_shard_with_two_names_is_one_shard(tmp_path: Path) -> None:
    """A link beside a file would otherwise train on each of its rows twice."""
    shard = tmp_path / "b.jsonl"
    shard.write_text('{"prompt": "p", "response": "r"}\n')
    (tmp_path / "a.jsonl").symlink_to(shard)
    paths = [str(shard), str(tmp_path / "a.jsonl")]
    assert [each.path for each in list_shards(paths)] == [str(tmp_path / "a.jsonl")]
    assert [source.files for source in list_sources(paths, [])] == [(str(tmp_path / "a.jsonl"),), ()]
    with pytest.raises(InputError, match=r"data\.weights: found .*a\.jsonl, which both"):
        list_sources(paths, [1.0, 2.0])
