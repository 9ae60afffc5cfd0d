"""Prompt sets: every row in exactly one unit, and everything that is wrong with a set refused with its location."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_files import write_jsonl, write_parquet

from pipelines.prompt_ids import IdIndex
from pipelines.prompt_preflight import RESULT_COLUMNS, check_prompt_set
from pipelines.prompt_rows import PromptFile
from pipelines.unit_output import OutputTask
from pipelines.work_units import PromptSet, list_prompt_files
from workers.config import PromptSettings, RowDecodingSettings
from workers.errors import InputError


def check(*paths: Path, output: str = "/nowhere/out", **settings: object) -> PromptSet:
    return check_prompt_set(PromptSettings(paths=tuple(map(str, paths)), **settings), output)  # type: ignore[arg-type]


def ids_of(prompt_set: PromptSet) -> list[object]:
    return [row.id for unit in prompt_set.read() for row in unit.rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ids 0..22 in five shards of all formats."""
    write_parquet(tmp_path / "in" / "a.parquet", {"id": list(range(5)), "prompt": list("abcde")})
    for start, name, compression in ((5, "b.jsonl", None), (10, "c.jsonl.gz", "gzip"), (15, "d.jsonl.zst", "zstd")):
        rows = [{"id": start + index, "prompt": f"p{index}"} for index in range(5)]
        write_jsonl(tmp_path / "in" / name, rows, compression=compression)
    write_parquet(
        tmp_path / "in" / "deep" / "e.parquet", {"id": pa.array([20, 21, 22], pa.int32()), "prompt": list("xyz")}
    )
    return tmp_path / "in"


@pytest.mark.parametrize("rows_per_unit", [1, 2, 3, 5, 7, 100])
def test_every_row_is_in_one_unit_whatever_the_format_and_the_unit_size(folder: Path, rows_per_unit: int) -> None:
    prompt_set = check(folder, rows_per_unit=rows_per_unit)
    units = list(prompt_set.read())
    assert ids_of(prompt_set) == list(range(23))
    assert [unit.unit for unit in units] == list(prompt_set.units())
    assert len(units) == prompt_set.num_units == len({unit.unit.name for unit in units})
    assert all(1 <= len(unit.rows) == unit.unit.num_rows <= rows_per_unit for unit in units)


@pytest.fixture(scope="module")
def three_files(tmp_path_factory: pytest.TempPathFactory) -> PromptSet:
    """14 units of at most 2 rows."""
    folder = tmp_path_factory.mktemp("three")
    write_parquet(folder / "a.parquet", {"id": list(range(9)), "prompt": ["p"] * 9})
    write_jsonl(folder / "b.jsonl", [{"id": 9 + i, "prompt": "p"} for i in range(8)])
    write_parquet(folder / "c.parquet", {"id": list(range(17, 26)), "prompt": ["p"] * 9})
    return check(folder, rows_per_unit=2)


@given(finished=st.sets(st.integers(0, 13)))
def test_whatever_is_finished_exactly_the_rest_is_read(three_files: PromptSet, finished: set[int]) -> None:
    units = list(three_files.units())
    assert len(units) == 14
    read = list(three_files.read({units[index].name for index in finished}))
    assert [unit.unit for unit in read] == [unit for index, unit in enumerate(units) if index not in finished]
    done = [2 * i if i < 5 else 9 + 2 * (i - 5) if i < 9 else 17 + 2 * (i - 9) for i in range(14) if i not in finished]
    assert [unit.rows[0].id for unit in read] == done


def test_units_do_not_depend_on_row_groups(tmp_path: Path) -> None:
    table = pa.table({"id": list(range(10)), "prompt": ["p"] * 10, "note": [f"n{i}" for i in range(10)]})
    for size in (1, 3, 10):
        pq.write_table(table, tmp_path / f"{size}.parquet", row_group_size=size)
        prompt_set = check(tmp_path / f"{size}.parquet", rows_per_unit=4, passthrough=("note",))
        units = list(prompt_set.read())
        assert [[row.id for row in unit.rows] for unit in units] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert [unit.extra["note"].to_pylist() for unit in units][2] == ["n8", "n9"]


def test_files_folders_and_globs_name_each_file_once(folder: Path) -> None:
    (folder / "_SUCCESS").touch()
    write_parquet(folder / "_errors" / "part.parquet", {"id": [1], "error_code": ["x"]})
    (folder / "notes.txt").touch()
    listed = list_prompt_files((str(folder), str(folder / "*.parquet"), str(folder / "b.jsonl")))
    assert [Path(file.path).name for file in listed] == [
        "a.parquet",
        "b.jsonl",
        "c.jsonl.gz",
        "d.jsonl.zst",
        "e.parquet",
    ]


def test_ids_are_made_from_file_and_row_when_there_are_none(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x" / "a.parquet", {"prompt": ["p", None]})
    write_parquet(tmp_path / "y" / "a.parquet", {"prompt": ["p"]})
    write_jsonl(tmp_path / "y" / "b.jsonl", [{"prompt": "p"}, b"{", b"", {"prompt": "q"}])
    prompt_set = check(tmp_path, rows_per_unit=2)
    assert prompt_set.id_type == pa.string() and not prompt_set.has_ids
    same_name = [f"{tmp_path}/x/a.parquet:0", f"{tmp_path}/x/a.parquet:1", f"{tmp_path}/y/a.parquet:0"]
    assert ids_of(prompt_set) == [*same_name, "b.jsonl:0", "b.jsonl:1", "b.jsonl:3"]


def test_malformed_lines_stay_rows_with_their_location(tmp_path: Path) -> None:
    lines = [
        {"id": 1, "prompt": "p"},
        b'{"id": 2, "prom',
        b"",
        b"[1]",
        b"\xff\xfe\xfd",
        b'{"id": 3, "prompt": "\\ud800"}',
        b'{"id": 3, "prompt": "\xed\xa0\x80"}',
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [*lines, {"id": 4, "prompt": None}])
    rows = [row for unit in check(path).read() for row in unit.rows]
    assert [row.id for row in rows] == [1, None, None, None, None, None, 4]
    assert [bool(row.problem) for row in rows] == [False, True, True, True, True, True, False]
    assert rows[1].location == f"{path} line 2" and rows[2].location == f"{path} line 4"


def test_texts_that_are_no_utf8_cost_their_row_only_and_no_id(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"], pa.binary()).buffers())
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2, 3], "prompt": texts})
    rows = [row for unit in check(path).read() for row in unit.rows]
    assert [row.id for row in rows] == [1, 2, 3]
    assert [bool(row.problem) for row in rows] == [False, True, False] and "'prompt'" in rows[1].problem
    path = write_parquet(tmp_path / "b.parquet", {"id": texts, "prompt": ["p"] * 3})
    with pytest.raises(InputError, match=f"{path} row 1.*'id'"):
        check(path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_mixed_null_double_and_unfit_ids_are_refused_with_locations(tmp_path: Path, suffix: str) -> None:
    def write(name: str, ids: list[object]) -> Path:
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            return write_parquet(path, {"id": ids, "prompt": ["p"] * len(ids)})
        return write_jsonl(path, [{"id": each, "prompt": "p"} for each in ids])

    integers, strings = write("a", [1, 2, 3]), write("b", ["x", "1"])
    first = "row 0" if suffix == "parquet" else "line 1"
    second = "row 1" if suffix == "parquet" else "line 2"
    with pytest.raises(
        InputError, match=rf"integer ids at {integers} {first} \(1\) and string ids at {strings} {first}"
    ):
        check(integers, strings)
    null = write("c", [7, None, 8])
    with pytest.raises(InputError, match=f"1 rows with a null id: {null} {second}"):
        check(integers, null)
    double = write("d", [9, 2, 9])
    with pytest.raises(InputError) as refusal:
        check(integers, double)
    assert f"2 at {integers} {second} and {double} {second}" in str(refusal.value)
    assert f"9 at {double} {first} and" in str(refusal.value)
    with pytest.raises(InputError, match="0.5 .float.; expected a string or a 64-bit integer"):
        check(write("e", [0.5]))
    assert ids_of(check(strings)) == ["x", "1"]


def test_mixed_ids_inside_one_json_shard_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "prompt": "p"}, {"id": "1", "prompt": "p"}])
    with pytest.raises(InputError, match="integer ids .* and string ids at .* line 2"):
        check(path)
    path = write_jsonl(tmp_path / "b.jsonl", [{"id": 1, "prompt": "p"}, {"prompt": "p"}])
    with pytest.raises(InputError, match=f"null id: {path} line 2"):
        check(path)


def test_duplicate_ids_after_blank_lines_are_found_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [b"", {"id": 1, "prompt": "p"}, b" ", {"id": 1, "prompt": "q"}])
    with pytest.raises(InputError, match=f"1 at {path} line 2 and {path} line 4"):
        check(path)


def test_ids_in_some_shards_only_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"id": [1], "prompt": ["p"]})
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p"}])
    with pytest.raises(InputError, match=r"`id` in .*a\.parquet but not in .*b\.jsonl"):
        check(tmp_path)


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 20), max_size=30), max_size=4),
    st.integers(1, 20),
    st.booleans(),
)
def test_duplicates_are_found_whether_spilled_or_not(files: list[list[int]], memory_rows: int, as_text: bool) -> None:
    with IdIndex("id", memory_rows) as ids:
        seen: set[int] = set()
        num_double = 0
        for number, values in enumerate(files):
            rows = range(len(values))
            ids.add(number, rows, [str(v) for v in values] if as_text else values, [str(row) for row in rows])
            num_double += sum(value in seen or seen.add(value) is not None for value in values)
        pairs = ids.duplicates()
    assert len(pairs) == min(3, num_double)
    for (file, row), (other_file, other_row) in pairs:
        assert files[file][row] == files[other_file][other_row] and (file, row) < (other_file, other_row)


def test_schemas_are_checked_in_every_shard(tmp_path: Path) -> None:
    good = write_parquet(tmp_path / "a.parquet", {"prompt": ["p"]})
    with pytest.raises(InputError, match=r"b\.parquet: found columns text; expected `prompt` or `messages`"):
        check(good, write_parquet(tmp_path / "b.parquet", {"text": ["p"]}))
    with pytest.raises(InputError, match="column 'prompt' of type int64; expected strings"):
        check(good, write_parquet(tmp_path / "c.parquet", {"prompt": [1]}))
    with pytest.raises(InputError, match="column 'messages' of type list"):
        check(good, write_parquet(tmp_path / "d.parquet", {"messages": [["hello"]]}))
    with pytest.raises(InputError, match=r"e\.jsonl: found columns id"):
        check(good, write_jsonl(tmp_path / "e.jsonl", [{"id": 1}]))
    with pytest.raises(InputError, match=r"g\.jsonl: found columns answer, question"):
        check(good, write_jsonl(tmp_path / "g.jsonl", [{"question": "q", "answer": "a"}]))
    (tmp_path / "f.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"f\.parquet: found unreadable from its footer"):
        check(good, tmp_path / "f.parquet")
    whole = write_jsonl(tmp_path / "g.jsonl.gz", [{"prompt": "p" * 50}] * 99, compression="gzip").read_bytes()
    (tmp_path / "g.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(InputError, match=r"g\.jsonl\.gz: found unreadable from line"):
        check(good, tmp_path / "g.jsonl.gz")


def test_paths_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no prompt file behind"):
        check(tmp_path / "absent.jsonl")
    (tmp_path / "a.csv").touch()
    with pytest.raises(InputError, match="a file of type"):
        check(tmp_path / "a.csv")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match="no rows in 1 files"):
        check(tmp_path / "blank.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"empty\.jsonl: found an empty file"):
        check(tmp_path)


def test_an_output_that_touches_the_input_is_refused(folder: Path) -> None:
    for output in (folder, f"{folder}/", folder / "out", folder.parent, folder / "a.parquet"):
        with pytest.raises(InputError, match="^output: "):
            check(folder, output=str(output))
    check(folder, output=f"{folder}-out")
    check(folder / "a.parquet", output=str(folder / "out"))


def test_an_output_that_leads_to_the_input_is_refused(folder: Path, tmp_path: Path) -> None:
    """Paths were once compared as they were spelled, and an overwriting job deleted its input through a link."""
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.parquet").symlink_to(folder / "a.parquet")
    for paths, output in (
        ([tmp_path / "link"], folder / "out"),
        ([folder], tmp_path / "link"),
        ([folder], tmp_path / "link" / "out"),
        ([folder], tmp_path / "new" / ".." / "in" / "out"),
        ([tmp_path / "links"], folder),
        ([tmp_path / "links" / "a.parquet"], tmp_path / "links"),
    ):
        with pytest.raises(InputError, match="^output: "):
            check(*paths, output=str(output))
    check(tmp_path / "links", output=str(folder / "out"))


def test_an_output_that_a_glob_of_the_input_would_find_is_refused(folder: Path) -> None:
    """The job would have found its own answers among the prompts when it was started again."""
    with pytest.raises(InputError, match="would take for prompts"):
        check(folder / "**" / "*.parquet", output=str(folder / "out"))
    check(folder / "*.parquet", output=str(folder / "out"))


def test_globs_leave_out_side_files_unless_they_spell_them(tmp_path: Path) -> None:
    """`**/*.parquet` over the output of a generate job once took its `_errors` for prompts."""
    for name in ("part-0", "_errors/part-0", "deep/_errors/more/part-0", "deep/part-1", "_part-2", ".hidden/part-3"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": ["p"]})

    def found(pattern: str) -> list[str]:
        return [str(Path(file.path).relative_to(tmp_path)) for file in list_prompt_files((str(tmp_path / pattern),))]

    assert found("**/*.parquet") == found("") == ["deep/part-1.parquet", "part-0.parquet"]
    assert found("*.parquet") == ["part-0.parquet"]
    assert found("_errors/*.parquet") == found("_err*/*.parquet") == ["_errors/part-0.parquet"]
    assert found("_part*") == found("_part-2.parquet") == ["_part-2.parquet"]
    assert found("*/_errors/**/*.parquet") == ["deep/_errors/more/part-0.parquet"]


def test_json_documents_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.json", [{"prompt": "p"}])
    for path in (tmp_path / "a.json", tmp_path, tmp_path / "*.json"):
        with pytest.raises(InputError, match=r"a\.json, a JSON document; .* rename it to \.jsonl"):
            check(path)
    write_jsonl(tmp_path / "b.ndjson.gz", [{"prompt": "p"}], compression="gzip")
    assert [Path(file.path).name for file in check(tmp_path).files] == ["b.ndjson.gz"]


def test_names_of_result_columns_are_those_of_the_results() -> None:
    task = OutputTask("/out", PromptSettings(), RowDecodingSettings(logprobs=True), pa.string(), pa.schema([]))
    assert tuple(task.result_schema().names) == RESULT_COLUMNS


def test_passed_through_columns_keep_values_and_have_one_type(tmp_path: Path) -> None:
    tags = pa.array([["a"], None], pa.list_(pa.string()))
    a = write_parquet(
        tmp_path / "a.parquet", {"prompt": ["p", "q"], "note": pa.array([1, 2], pa.int32()), "tags": tags}
    )
    b = write_jsonl(
        tmp_path / "b.jsonl", [{"prompt": "p", "note": 2.5, "tags": []}, b"broken", {"prompt": "q", "note": 3}]
    )
    prompt_set = check(a, b, passthrough=("note", "tags"))
    assert prompt_set.extra == pa.schema([("note", pa.float64()), ("tags", pa.list_(pa.string()))])
    table = pa.concat_tables([unit.extra for unit in prompt_set.read()])
    assert table["note"].to_pylist() == [1, 2, 2.5, None, 3] and table["tags"].to_pylist() == [
        ["a"],
        None,
        [],
        None,
        None,
    ]
    with pytest.raises(InputError, match="'note' is double in .* and string in .*c.jsonl line 1"):
        check(a, b, write_jsonl(tmp_path / "c.jsonl", [{"prompt": "p", "note": "x"}]), passthrough=("note",))
    with pytest.raises(InputError, match=r"line 2: found 'note'|'note' is int64 in .* and string in .* line 2"):
        check(
            write_jsonl(tmp_path / "d.jsonl", [{"prompt": "p", "note": 1}, {"prompt": "p", "note": "x"}]),
            passthrough=("note",),
        )
    with pytest.raises(InputError, match=r"no column 'other' in .*a\.parquet"):
        check(a, passthrough=("other",))
    with pytest.raises(InputError, match="'text'; expected a name other than"):
        check(a, passthrough=("text",))


def test_an_input_that_grows_during_the_job_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}])
    prompt_set = check(path)
    path.write_text(json.dumps({"prompt": "p"}) + "\n" + json.dumps({"prompt": "q"}) + "\n")
    with pytest.raises(InputError, match="2 rows now, 1 in the preflight"):
        list(prompt_set.read())


def test_memory_does_not_grow_with_the_set(tmp_path: Path) -> None:
    """At most one chunk and one unit are held, however long the file is."""
    import tracemalloc

    peaks = []
    for num_rows in (4_000, 40_000):
        path = write_jsonl(tmp_path / f"{num_rows}.jsonl", ({"id": i, "prompt": f"{i} " * 20} for i in range(num_rows)))
        tracemalloc.start()
        prompt_set = check(path, rows_per_unit=256)
        assert sum(len(unit.rows) for unit in prompt_set.read()) == num_rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    ids = 28 * 40_000
    assert peaks[1] < 1.5 * peaks[0] + 4 * ids, peaks


def test_a_file_knows_its_format() -> None:
    assert PromptFile("s3://b/X.PARQUET", 1, "v", "x").is_parquet
    assert not PromptFile("a.jsonl.gz", 1, "v", "a").is_parquet
