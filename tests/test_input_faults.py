"""Input that is damaged, odd, or changes under the run: the right message, or one rejected row."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import MASK_ID, byte_tokenizer
from prepared_shards import ENDS, prepare_here, turns, write_lines

from pipelines import preparation_tasks, storage
from pipelines.preparation_tasks import Preparation, Task, cut_shards, write_rows
from pipelines.row_files import MAX_LINE_BYTES
from pipelines.sft_data import prepare_sft_data
from pipelines.sft_source import inspect_shards, list_shards
from workers import chat
from workers.config import DataSettings
from workers.errors import InputError

GOOD = turns("2+3", "5")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def one_task(folder: Path, tokenizer_folder: str) -> tuple[Task, Preparation]:
    """The task of the first shard, listed and inspected."""
    settings = DataSettings(train=(str(folder / "in"),))
    preparation = Preparation(settings, tokenizer_folder, MASK_ID, ENDS, str(folder / "out"))
    return cut_shards(inspect_shards(settings))[0], preparation


def test_a_shard_that_vanishes_after_the_listing_is_named(tmp_path: Path, tokenizer_folder: str) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [GOOD])
    task, preparation = one_task(tmp_path, tokenizer_folder)
    (tmp_path / "in" / "a.jsonl").unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: found no such file"):
        write_rows(task, preparation)
    assert not (tmp_path / "out" / "done").exists()


def test_a_shard_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would be of two versions, under the fingerprint of the first."""
    path = tmp_path / "in" / "a.jsonl"
    write_lines(path, [GOOD] * 3)
    task, preparation = one_task(tmp_path, tokenizer_folder)
    encode_row = preparation_tasks.encode_row

    def change_and_encode(*args, **options):
        path.write_text(json.dumps(GOOD) + "\n")
        return encode_row(*args, **options)

    monkeypatch.setattr(preparation_tasks, "encode_row", change_and_encode)
    with pytest.raises(InputError, match=r"a\.jsonl: found a shard that changed while it was read"):
        write_rows(task, preparation)
    assert not (tmp_path / "out" / "done").exists()


def test_a_parquet_file_that_is_cut_off_is_named_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    pq.write_table(pa.Table.from_pylist([GOOD] * 1000), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"a\.parquet: found .*not a readable Parquet file"):
        inspect_shards(DataSettings(train=(str(path),)))


def test_a_parquet_file_that_is_damaged_inside_says_from_which_row(tmp_path: Path, tokenizer_folder: str) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    rows = [{"prompt": os.urandom(40).hex(), "response": "b"} for _ in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[start : start + 4000] = os.urandom(4000)
    path.write_bytes(content)
    task, preparation = one_task(tmp_path, tokenizer_folder)
    with pytest.raises(InputError, match=r"a\.parquet: found unreadable from row (768|1000) on"):
        write_rows(task, preparation)


def test_lines_that_are_no_utf_8_are_rejected_as_such(tmp_path: Path, tokenizer_folder: str) -> None:
    """They were called malformed JSON."""
    lines = [json.dumps(turns(text, "b"), ensure_ascii=False) for text in ("a", "\u00e9", "c")]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert [row["row"] for row in prepared] == [0, 2]
    assert [(row["row"], row["reason"]) for row in rejected] == [(1, chat.NOT_UTF_8)]
    assert rejected[0]["detail"].startswith("not UTF-8: byte 0xe9 at ")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_refused_by_name(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes((json.dumps(GOOD) + "\n").encode(encoding))
    with pytest.raises(InputError, match=r"a\.jsonl: found text in UTF-16; expected JSONL in UTF-8\. .*iconv"):
        inspect_shards(DataSettings(train=(str(tmp_path / "in"),)))


def test_windows_line_ends_and_a_missing_last_one_change_nothing(tmp_path: Path, tokenizer_folder: str) -> None:
    line = json.dumps(GOOD).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\r\n".join([line, b"", line, b" \t", line]))
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert [row["row"] for row in prepared] == [0, 2, 4]
    assert not rejected


def test_a_line_above_the_limit_is_one_rejected_row(tmp_path: Path, tokenizer_folder: str) -> None:
    line = json.dumps(GOOD).encode() + b"\n"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(line + b'{"messages": "' + b"x" * MAX_LINE_BYTES + b'"}\n' + line)
    prepared, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert [row["row"] for row in prepared] == [0, 2]
    assert [(row["row"], row["reason"], row["detail"]) for row in rejected] == [
        (1, chat.MALFORMED_LINE, f"a line of more than {MAX_LINE_BYTES} bytes")
    ]


def test_columns_of_one_name_in_a_message_are_unreadable_rows(tmp_path: Path, tokenizer_folder: str) -> None:
    texts = [pa.array(["user", "assistant"])] * 2 + [pa.array(["a", "b"])]
    struct = pa.StructArray.from_arrays(texts, ["role", "role", "content"])
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 2], struct)}), tmp_path / "in" / "a.parquet")
    _, rejected = prepare_here(tmp_path, tokenizer_folder)
    assert [(row["row"], row["reason"]) for row in rejected] == [(0, chat.UNREADABLE_ROW)]


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with a file, a link to a folder elsewhere, and links that lead back into it."""
    write_lines(tmp_path / "elsewhere" / "deep" / "b.jsonl", [GOOD])
    write_lines(tmp_path / "in" / "a.jsonl", [GOOD])
    write_lines(tmp_path / "in" / "sub" / "c.jsonl", [GOOD])
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "sub" / "again").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "self").symlink_to(".")
    (tmp_path / "whole").symlink_to(tmp_path / "in")
    return tmp_path


@pytest.mark.parametrize("asked", ["in", "in/**", "in/**/*.jsonl", "whole", "whole/**/*.jsonl"])
def test_links_to_folders_are_followed_alike_by_folders_and_globs(linked: Path, asked: str) -> None:
    """A glob took the shards behind a link and a folder did not; a link that leads back made a glob take each forty times."""
    found = [shard.path for shard in list_shards([str(linked / asked)])]
    root = linked / asked.split("/")[0]
    assert found == [str(root / name) for name in ("a.jsonl", "link/deep/b.jsonl", "sub/c.jsonl")]


def test_a_link_that_leads_back_can_be_asked_for_by_name(linked: Path) -> None:
    for asked in ("in/self/*.jsonl", "in/sub/again/a.jsonl"):
        assert len(list_shards([str(linked / asked)])) == 1


@pytest.mark.parametrize("asked", ["in", "in/*"])
def test_a_link_to_nothing_is_named(tmp_path: Path, asked: str) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [GOOD])
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(InputError, match=r"in/b\.jsonl: found no such file"):
        list_shards([str(tmp_path / asked)])


def test_held_out_shards_are_named_by_their_own_setting(
    tmp_path: Path, tokenizer_folder: str, ray_session: None
) -> None:
    write_lines(tmp_path / "held" / "a.jsonl", [turns("a", None)])
    settings = DataSettings(train=("nowhere",), weights=(2.0,), max_rejected_share=1.0)

    def prepare(path: Path) -> None:
        prepare_sft_data(
            settings,
            tokenizer_folder=tokenizer_folder,
            mask_token_id=MASK_ID,
            end_ids=ENDS,
            output=str(tmp_path / "out"),
            paths=(str(path),),
            where="data.held_out",
        )

    for path in (tmp_path / "gone", tmp_path / "held"):
        with pytest.raises(InputError, match=r"^data\.held_out: found"):
            prepare(path)
    write_lines(tmp_path / "held" / "a.jsonl", [GOOD])
    prepare(tmp_path / "held")
    assert storage.exists(str(tmp_path / "out" / "index.json"))
