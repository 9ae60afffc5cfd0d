"""Local paths and S3 by the same calls; S3 answers are scripted with botocore's Stubber."""

import gzip
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from botocore.response import StreamingBody
from botocore.stub import ANY, Stubber

from pipelines import s3_objects, storage
from workers.errors import InputError

NAMES = ["a.txt", "b/c.txt", "b/d.log", "b/e/f.txt", ".hidden/g.txt", "b/.h.txt"]


@pytest.fixture
def tree(tmp_path: Path) -> str:
    for name in NAMES:
        storage.publish_bytes(str(tmp_path / name), name.encode())
    return str(tmp_path)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="key")
    monkeypatch.setattr(s3_objects, "_client", lambda: client)
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def listing(*keys: str) -> dict[str, Any]:
    return {
        "IsTruncated": False,
        "KeyCount": len(keys),
        "Contents": [{"Key": key, "Size": len(key), "ETag": f'"{key}"'} for key in keys],
    }


def test_local_listing_is_sorted_recursive_and_without_dot_files(tree: str) -> None:
    found = storage.list_folder(tree)
    assert [os.path.relpath(info.path, tree) for info in found] == ["a.txt", "b/c.txt", "b/d.log", "b/e/f.txt"]
    assert [info.size for info in found] == [5, 7, 7, 9]
    assert storage.list_folder(storage.join(tree, "nowhere")) == []


@pytest.mark.parametrize(
    "pattern", ["*.txt", "b/*", "**/*.txt", "b/**/*.txt", "?.txt", "b/[cd].*", "b/[!c].*", "*/*/*"]
)
def test_globs_mean_the_same_on_s3_as_on_disk(tree: str, pattern: str, s3: Stubber) -> None:
    s3.add_response("list_objects_v2", listing(*[f"data/{name}" for name in NAMES], "data/b/"))
    remote = [info.path.removeprefix("s3://bucket/data/") for info in storage.list_glob(f"s3://bucket/data/{pattern}")]
    local = [os.path.relpath(info.path, tree) for info in storage.list_glob(os.path.join(tree, pattern))]
    assert remote == local
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


def test_a_glob_below_a_dot_folder_on_s3_finds_what_is_there(s3: Stubber) -> None:
    """A dot anywhere in the key once hid a file, also in the part of the path that the user had written out."""
    s3.add_response("list_objects_v2", listing(".data/a.txt", ".data/.b.txt", ".data/.c/d.txt"))
    assert [info.path for info in storage.list_glob("s3://bucket/.data/**/*.txt")] == ["s3://bucket/.data/a.txt"]


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [("/a/b/c.txt", "/a/**/*.txt", True), ("/a/b/c.txt", "/a/*.txt", False), ("/a/c.txt", "/a/c.txt", True)],
)
def test_a_path_matches_a_glob_without_being_there(path: str, pattern: str, expected: bool) -> None:
    assert storage.matches_glob(path, pattern) == expected


def test_version_changes_with_the_content(tree: str) -> None:
    path = storage.join(tree, "a.txt")
    before = storage.find_file(path)
    storage.publish_bytes(path, b"other")
    after = storage.find_file(path)
    assert before is not None
    assert after is not None
    assert before.size == after.size
    assert before.version != after.version


def test_delete_and_exists(tree: str) -> None:
    assert storage.exists(storage.join(tree, "b"))
    storage.delete(storage.join(tree, "b"))
    storage.delete(storage.join(tree, "b"))
    storage.delete(storage.join(tree, "a.txt"))
    assert storage.list_folder(tree) == []


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


def test_s3_publish_is_one_put(s3: Stubber, tree: str) -> None:
    s3.add_response("put_object", {}, {"Bucket": "bucket", "Key": "a/b.txt", "Body": b"data"})
    storage.publish_bytes("s3://bucket/a/b.txt", b"data")
    s3.add_response("put_object", {}, {"Bucket": "bucket", "Key": "a/c.txt", "Body": ANY, "ChecksumAlgorithm": ANY})
    storage.publish_file(storage.join(tree, "a.txt"), "s3://bucket/a/c.txt")


def test_s3_objects_are_read_by_ranges_and_can_seek(s3: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"row": list(range(1000))}), sink)
    content = sink.getvalue()
    monkeypatch.setattr(s3_objects, "READ_BUFFER_BYTES", 512)
    s3.add_response("head_object", {"ContentLength": len(content), "ETag": '"tag"'}, {"Bucket": "bucket", "Key": "x"})
    monkeypatch.setattr(s3.client, "get_object", lambda **request: {"Body": _range(content, **request)})
    with storage.open_read("s3://bucket/x") as file:
        assert pq.read_table(file)["row"].to_pylist() == list(range(1000))
        file.seek(-4, os.SEEK_END)
        assert file.read() == b"PAR1"


def _range(content: bytes, *, Bucket: str, Key: str, Range: str, IfMatch: str) -> StreamingBody:
    assert (Bucket, Key, IfMatch) == ("bucket", "x", '"tag"')
    first, last = map(int, Range.removeprefix("bytes=").split("-"))
    assert last < len(content)
    return StreamingBody(io.BytesIO(content[first : last + 1]), last + 1 - first)


def test_s3_missing_object_is_no_error_to_ask_for(s3: Stubber) -> None:
    s3.add_client_error("head_object", "404", http_status_code=404)
    s3.add_response("list_objects_v2", listing(), {"Bucket": "bucket", "Prefix": "x/", "MaxKeys": 1})
    assert not storage.exists("s3://bucket/x")


def test_s3_delete_takes_what_is_below_the_folder_only(s3: Stubber) -> None:
    s3.add_response("list_objects_v2", listing("x/", "x/a"), {"Bucket": "bucket", "Prefix": "x/"})
    deleted = {"Objects": [{"Key": "x/"}, {"Key": "x/a"}, {"Key": "x"}], "Quiet": True}
    s3.add_response("delete_objects", {}, {"Bucket": "bucket", "Delete": deleted})
    storage.delete("s3://bucket/x")


@pytest.mark.parametrize(
    ("code", "words"),
    [("NoSuchBucket", "no bucket 'bucket'"), ("AccessDenied", "access denied"), ("ExpiredToken", "access denied")],
)
def test_s3_mistakes_say_what_is_wrong(s3: Stubber, code: str, words: str) -> None:
    s3.add_client_error("list_objects_v2", code)
    with pytest.raises(InputError, match=words):
        storage.list_folder("s3://bucket/x")


@pytest.mark.parametrize(
    ("error", "words"),
    [(EndpointConnectionError(endpoint_url="http://nowhere"), "no answer"), (NoCredentialsError(), "credentials")],
)
def test_s3_without_network_or_credentials(
    s3: Stubber, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(**request: Any) -> None:
        raise error

    monkeypatch.setattr(s3.client, "put_object", fail)
    with pytest.raises(InputError, match=words):
        storage.publish_bytes("s3://bucket/x", b"")


def test_uri_without_a_bucket() -> None:
    with pytest.raises(InputError, match="bucket"):
        storage.list_folder("s3:///x")


def test_join() -> None:
    assert storage.join("s3://bucket/a/", "b", "c.txt") == "s3://bucket/a/b/c.txt"
    assert storage.join("/a", "b") == "/a/b"
