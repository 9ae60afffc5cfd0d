"""Local paths and S3 by the same calls; S3 is a server of its own, spoken to over HTTP."""

import gzip
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import s3_client, s3_objects, storage
from workers.errors import InputError

NAMES = ["a.txt", "b/c.txt", "b/d.log", "b/e/f.txt", ".hidden/g.txt", "b/.h.txt"]


@pytest.fixture
def tree(tmp_path: Path) -> str:
    for name in NAMES:
        storage.publish_bytes(str(tmp_path / name), name.encode())
    return str(tmp_path)


@pytest.fixture
def remote_tree(bucket: str) -> str:
    """The same files on S3, and an object that stands for a folder, as the console makes it."""
    for name in NAMES:
        storage.publish_bytes(f"{bucket}/data/{name}", name.encode())
    put_marker(f"{bucket}/data/b/")
    return f"{bucket}/data"


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder."""
    return str(tmp_path / "folder") if request.param == "local" else f"{request.getfixturevalue('bucket')}/folder"


def put_marker(uri: str) -> None:
    name, key = s3_client.split(uri)
    s3_client.client().put_object(Bucket=name, Key=key)


def relative(found: list[s3_objects.FileInfo], folder: str) -> list[str]:
    return [info.path.removeprefix(f"{folder}/") for info in found]


@pytest.mark.parametrize("kind", ["tree", "remote_tree"])
def test_a_listing_is_sorted_recursive_and_without_dot_names(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    found = storage.list_folder(folder)
    assert relative(found, folder) == ["a.txt", "b/c.txt", "b/d.log", "b/e/f.txt"]
    assert [info.size for info in found] == [5, 7, 7, 9]
    assert storage.list_folder(f"{folder}/") == found or kind == "tree"
    assert storage.list_folder(storage.join(folder, "nowhere")) == []


@pytest.mark.parametrize(
    "pattern", ["*.txt", "b/*", "**/*.txt", "b/**/*.txt", "?.txt", "b/[cd].*", "b/[!c].*", "*/*/*"]
)
def test_globs_mean_the_same_on_s3_as_on_disk(tree: str, pattern: str, remote_tree: str) -> None:
    local = relative(storage.list_glob(os.path.join(tree, pattern)), tree)
    assert relative(storage.list_glob(f"{remote_tree}/{pattern}"), remote_tree) == local
    assert local


def test_publish_replaces_as_a_whole_and_leaves_nothing_when_it_fails(tree: str) -> None:
    path = storage.join(tree, "a.txt")
    storage.publish_bytes(path, b"new")
    assert storage.read_bytes(path) == b"new"
    with pytest.raises(TypeError):
        storage.publish_bytes(path, "not bytes")  # type: ignore[arg-type]
    assert storage.read_bytes(path) == b"new"
    storage.publish_file(path, storage.join(tree, "copy", "a.txt"))
    assert storage.read_bytes(storage.join(tree, "copy", "a.txt")) == b"new"
    assert not [name for _, _, names in os.walk(tree) for name in names if name.endswith(".tmp")]


def test_of_many_that_publish_a_new_file_one_succeeds(folder: str) -> None:
    path, barrier = storage.join(folder, "lock"), threading.Barrier(8)

    def publish(number: int) -> bool:
        barrier.wait()
        return storage.publish_new(path, b"holder %d" % number)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(publish, range(8)))
    assert answers.count(True) == 1
    assert storage.read_bytes(path) == b"holder %d" % answers.index(True)
    assert not storage.publish_new(path, b"late")
    storage.delete(path)
    assert storage.publish_new(path, b"next")
    assert relative(storage.list_folder(folder), folder) == ["lock"]
    assert storage.is_s3(folder) or os.listdir(folder) == ["lock"]


def test_a_folder_with_dot_names_only_is_not_empty(folder: str) -> None:
    assert storage.is_empty(folder)
    storage.publish_bytes(storage.join(folder, ".hidden"), b"")
    assert not storage.is_empty(folder)


def test_a_folder_of_the_console_is_empty_and_no_file(bucket: str) -> None:
    put_marker(f"{bucket}/new/")
    assert storage.is_empty(f"{bucket}/new")
    assert storage.find_file(f"{bucket}/new/") is None
    assert storage.find_file(f"{bucket}/") is None
    assert storage.list_folder(bucket) == []


def test_published_folders_come_down_again_with_the_last_files_last(folder: str, tmp_path: Path) -> None:
    for name in ("z.txt", "deep/a.txt", "mark.json"):
        storage.publish_bytes(str(tmp_path / "local" / name), name.encode())
    storage.publish_folder(str(tmp_path / "local"), folder, last=("mark.json", "absent.json"))
    assert relative(storage.list_folder(folder), folder) == ["deep/a.txt", "mark.json", "z.txt"]
    if storage.is_s3(folder):
        storage.download_folder(folder, storage.list_folder(folder), str(tmp_path / "copy"))
        assert (tmp_path / "copy" / "deep" / "a.txt").read_text() == "deep/a.txt"


def test_a_file_that_changes_during_a_copy_is_an_error(bucket: str, tmp_path: Path) -> None:
    storage.publish_bytes(f"{bucket}/x/a", b"old")
    files = storage.list_folder(f"{bucket}/x")
    storage.publish_bytes(f"{bucket}/x/a", b"new")
    with pytest.raises(InputError, match="changed while it was read"):
        storage.download_folder(f"{bucket}/x", files, str(tmp_path / "copy"))


def test_large_files_go_up_in_parts(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_objects, "PART_BYTES", 5 * 2**20)
    content = os.urandom(12 * 2**20)
    (tmp_path / "large").write_bytes(content)
    storage.publish_file(str(tmp_path / "large"), f"{bucket}/large")
    info = storage.find_file(f"{bucket}/large")
    assert info is not None
    assert info.version.endswith('-3"')  # the ETag of an object in three parts
    assert storage.read_bytes(f"{bucket}/large") == content


def test_a_glob_below_a_dot_folder_on_s3_finds_what_is_there(bucket: str) -> None:
    """A dot anywhere in the key once hid a file, also in the part of the path that the user had written out."""
    for name in ("a.txt", ".b.txt", ".c/d.txt"):
        storage.publish_bytes(f"{bucket}/.data/{name}", b"")
    assert [info.path for info in storage.list_glob(f"{bucket}/.data/**/*.txt")] == [f"{bucket}/.data/a.txt"]


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [("/a/b/c.txt", "/a/**/*.txt", True), ("/a/b/c.txt", "/a/*.txt", False), ("/a/c.txt", "/a/c.txt", True)],
)
def test_a_path_matches_a_glob_without_being_there(path: str, pattern: str, expected: bool) -> None:
    assert storage.matches_glob(path, pattern) == expected


def test_version_changes_with_the_content(folder: str) -> None:
    path = storage.join(folder, "a.txt")
    storage.publish_bytes(path, b"a.txt")
    before = storage.find_file(path)
    storage.publish_bytes(path, b"other")
    after = storage.find_file(path)
    assert before is not None
    assert after is not None
    assert before.size == after.size
    assert before.version != after.version


@pytest.mark.parametrize("kind", ["tree", "remote_tree"])
def test_delete_and_exists(kind: str, request: pytest.FixtureRequest) -> None:
    tree = request.getfixturevalue(kind)
    storage.publish_bytes(f"{tree}/bb", b"")  # begins like a folder that is deleted
    assert storage.exists(storage.join(tree, "b"))
    storage.delete(storage.join(tree, "b"))
    storage.delete(storage.join(tree, "b"))
    storage.delete(storage.join(tree, "a.txt"))
    assert relative(storage.list_folder(tree), tree) == ["bb"]
    assert not storage.exists(storage.join(tree, "b"))


def test_compressed_input_is_read_through(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    with pa.CompressedOutputStream(str(tmp_path / "a.zst"), "zstd") as out:
        out.write(b"one\ntwo\n")
    for name in ("a.gz", "a.zst"):
        with storage.open_input(str(tmp_path / name)) as file:
            assert list(iter(file.readline, b"")) == [b"one\n", b"two\n"]


def test_local_mistakes_name_the_path(tree: str) -> None:
    for call in (storage.open_read, storage.read_bytes):
        with pytest.raises(InputError, match="nowhere"):
            call(storage.join(tree, "nowhere"))
    with pytest.raises(InputError, match=r"a\.txt"):
        storage.publish_bytes(storage.join(tree, "a.txt", "b.txt"), b"")


def test_s3_objects_are_read_by_ranges_and_can_seek(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"row": list(range(1000))}), sink)
    storage.publish_bytes(f"{bucket}/x", sink.getvalue())
    monkeypatch.setattr(s3_objects, "READ_BUFFER_BYTES", 512)
    with storage.open_read(f"{bucket}/x") as file:
        assert pq.read_table(file)["row"].to_pylist() == list(range(1000))
        file.seek(-4, os.SEEK_END)
        assert file.read() == b"PAR1"


def test_more_objects_than_one_answer_holds_are_listed_and_deleted(bucket: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: storage.publish_bytes(f"{bucket}/many/{number:05d}", b""), range(1005)))
    assert len(storage.list_folder(f"{bucket}/many")) == 1005
    assert len(storage.list_glob(f"{bucket}/many/0100?")) == 5
    storage.publish_bytes(f"{bucket}/manyfold", b"")
    storage.delete(f"{bucket}/many")
    assert [info.path for info in storage.list_folder(bucket)] == [f"{bucket}/manyfold"]


ODD_KEYS = ["a b", "ü€/漢", "100%", "p%20q", "x//y", "/lead", "plus+", "a#b?c", "a&b=c", "~'!()", "..", "trailing."]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_are_taken_as_they_are(bucket: str, key: str) -> None:
    path = f"{bucket}/{key}/file"
    storage.publish_bytes(path, key.encode())
    assert storage.read_bytes(path) == key.encode()
    assert storage.exists(f"{bucket}/{key}")
    storage.delete(f"{bucket}/{key}")
    assert not storage.exists(path)


def test_a_bucket_alone_is_a_folder(bucket: str) -> None:
    storage.publish_bytes(f"{bucket}/a", b"")
    for path in (bucket, f"{bucket}/"):
        assert [info.path for info in storage.list_folder(path)] == [f"{bucket}/a"]
        assert storage.exists(path)
        assert not storage.is_empty(path)


@pytest.mark.parametrize("key", ["run", "ru n/ü/100%25", "a/b"])
def test_checkpoints_are_written_where_the_run_is(bucket: str, key: str) -> None:
    """Ray Train has the path from us and the filesystem from pyarrow; as one URI, pyarrow would decode the path."""
    settings = storage.run_storage(f"{bucket}/{key}")
    filesystem, path = settings["storage_filesystem"], settings["storage_path"]
    filesystem.create_dir(f"{path}/checkpoints")
    with filesystem.open_output_stream(f"{path}/checkpoints/a") as file:
        file.write(b"weights")
    assert storage.read_bytes(f"{bucket}/{key}/checkpoints/a") == b"weights"
    filesystem.delete_dir(f"{path}/checkpoints")
    assert storage.list_folder(f"{bucket}/{key}") == []


def test_a_missing_bucket_is_named(s3_server: str, tmp_path: Path) -> None:
    path = "s3://no-such-bucket/x"
    for call in (
        storage.list_folder,
        storage.is_empty,
        storage.exists,
        storage.delete,
        storage.run_storage,
        lambda path: storage.publish_bytes(path, b""),
        lambda path: storage.publish_new(path, b""),
        lambda path: storage.publish_file(__file__, path),
    ):
        with pytest.raises(InputError, match="no bucket 'no-such-bucket'"):
            call(path)
    with pytest.raises(InputError, match=r"s3://no-such-bucket/x: found no such object.*the bucket"):
        storage.read_bytes(path)


def test_names_that_cannot_be() -> None:
    for path, words in (("s3:///x", "no bucket name"), ("s3://Not a bucket/x", "bucket or key name")):
        with pytest.raises(InputError, match=words):
            storage.list_folder(path)


def test_a_missing_object_is_no_error_to_ask_for(bucket: str) -> None:
    assert not storage.exists(f"{bucket}/x")
    assert storage.find_file(f"{bucket}/x") is None
    with pytest.raises(InputError, match="no such object"):
        storage.read_bytes(f"{bucket}/x")


def test_join() -> None:
    assert storage.join("s3://bucket/a/", "b", "c.txt") == "s3://bucket/a/b/c.txt"
    assert storage.join("/a", "b") == "/a/b"
