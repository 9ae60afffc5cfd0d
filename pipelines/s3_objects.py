"""S3 objects through boto3: what `pipelines.storage` calls for `s3://` paths."""

import fnmatch
import io
import os
import re
import shutil
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from pipelines.s3_client import SCHEME, back_off, clear_errors, client, exceptions, num_attempts, split
from workers.errors import InputError

READ_BUFFER_BYTES = 8 * 2**20
# Larger files go up in parts of this size, several at a time and each with retries; they too become visible as a whole.
PART_BYTES = 64 * 2**20
DELETE_BATCH = 1000


@dataclass(frozen=True)
class FileInfo:
    """One stored file. `version` changes when the content does: the modification time locally, the ETag on S3."""

    path: str
    size: int
    version: str


def find(uri: str) -> FileInfo | None:
    """The object of exactly this URI, or None. An empty object with a slash at its end stands for a folder and is none."""
    bucket, key = split(uri)
    if not key or key.endswith("/"):
        return None
    with clear_errors(uri):
        try:
            head = client().head_object(Bucket=bucket, Key=key)
        except exceptions().ClientError as error:
            # A HEAD answer has no body, so a missing bucket is also just "404" here; listing tells them apart.
            if error.response["Error"]["Code"] not in ("404", "NoSuchKey", "NotFound"):
                raise
            return None
    return FileInfo(uri, head["ContentLength"], head["ETag"])


def has_any(folder: str) -> bool:
    """Whether there is an object below a folder; the empty object that stands for the folder itself is none."""
    bucket, key = split(folder)
    prefix = _as_folder(key)
    with clear_errors(folder):
        answer = client().list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=2)
    return any(item["Key"] != prefix for item in answer.get("Contents", ()))


def list_folder(folder: str) -> list[FileInfo]:
    """The objects below a folder, sorted by path, without those whose path from there on has a dot name."""
    key = split(folder)[1]
    found = _list_prefix(folder, _as_folder(key))
    return [info for info in found if not _is_hidden(info.path[len(folder.rstrip("/")) :])]


def list_glob(pattern: str) -> list[FileInfo]:
    """The objects that match a glob, sorted by path."""
    key_pattern = split(pattern)[1]
    matches = re.compile(glob_regex(key_pattern)).fullmatch
    prefix = re.split(r"[*?\[]", key_pattern, maxsplit=1)[0]
    start = prefix.rfind("/") + 1
    found = _list_prefix(pattern, prefix)
    keys = [split(info.path)[1] for info in found]
    return [info for info, key in zip(found, keys, strict=True) if matches(key) and not _is_hidden(key[start:])]


def open_read(uri: str) -> BinaryIO:
    """A seekable reader that fetches ranges, so nothing is held beyond a buffer.

    Raises:
        InputError: no such object, or it may not be read.
    """
    info = find(uri)
    if info is None:
        raise InputError(uri, "no such object", "an existing S3 object", "Check the bucket and the key.")
    return _open(info)


def download(info: FileInfo, local_path: str) -> None:
    """Copies the version of an object that a listing has found to a local file."""
    with _open(info) as source, open(local_path, "wb") as file:
        shutil.copyfileobj(source, file, READ_BUFFER_BYTES)


def put_bytes(uri: str, data: bytes) -> None:
    """Publishes an object by one PUT."""
    bucket, key = split(uri)
    with clear_errors(uri):
        client().put_object(Bucket=bucket, Key=key, Body=data)


def put_new(uri: str, data: bytes) -> bool:
    """Publishes an object by one PUT unless there is one already; returns whether this call has made it."""
    bucket, key = split(uri)
    with clear_errors(uri):
        for attempt in range(1, num_attempts() + 1):
            try:
                client().put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
                return True
            except exceptions().ClientError as error:
                code = error.response["Error"]["Code"]
                if code in ("PreconditionFailed", "412"):
                    return _is_content(uri, data)
                # Somebody else is writing or deleting it at this moment: S3 asks to try again.
                if code not in ("ConditionalRequestConflict", "409") or attempt == num_attempts():
                    raise
                back_off(attempt)
    raise AssertionError("the last attempt returns or raises")


def _is_content(uri: str, data: bytes) -> bool:
    """Whether an object holds `data`: then the PUT that was refused had been done, and its answer lost."""
    info = find(uri)
    if info is None or info.size != len(data):
        return False
    with _open(info) as file:
        return file.read() == data


def put_file(local_path: str, uri: str) -> None:
    """Publishes a local file as an object: by one PUT, or when it is large in parts."""
    from boto3.s3.transfer import TransferConfig

    bucket, key = split(uri)
    config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)
    with clear_errors(uri), open(local_path, "rb") as file:
        client().upload_fileobj(file, bucket, key, Config=config)


def delete(uri: str) -> None:
    """Deletes the object of this URI, and all below it as a folder."""
    bucket, key = split(uri)
    keys = [split(info.path)[1] for info in _list_prefix(uri, _as_folder(key), with_markers=True)]
    if key and not key.endswith("/"):
        keys.append(key)  # S3 accepts the deletion of a key that is not there
    for start in range(0, len(keys), DELETE_BATCH):
        batch = [{"Key": each} for each in keys[start : start + DELETE_BATCH]]
        with clear_errors(uri):
            answer = client().delete_objects(Bucket=bucket, Delete={"Objects": batch, "Quiet": True})
        if answer.get("Errors"):
            first = answer["Errors"][0]
            raise InputError(f"{SCHEME}{bucket}/{first['Key']}", first["Code"], "an object that may be deleted")


class _Reader(io.RawIOBase):
    """A view of one object by ranged GETs, pinned to the version that was found."""

    def __init__(self, info: FileInfo) -> None:
        self._info = info
        self._bucket, self._key = split(info.path)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._info.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._info.size)
        if self._position >= end:
            return 0
        data = self._read_range(self._position, end - 1)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        """The rest in one GET; the inherited method would make one for each 8 KiB."""
        if self._position >= self._info.size:
            return b""
        data = self._read_range(self._position, self._info.size - 1)
        self._position += len(data)
        return data

    def _read_range(self, first: int, last: int) -> bytes:
        kinds = exceptions()
        for attempt in range(1, num_attempts() + 1):
            with clear_errors(self._info.path):
                answer = client().get_object(
                    Bucket=self._bucket, Key=self._key, Range=f"bytes={first}-{last}", IfMatch=self._info.version
                )
                try:
                    return cast(bytes, answer["Body"].read())
                # An answer that breaks off: botocore tries calls again, but not what comes after the headers.
                except (kinds.HTTPClientError, kinds.IncompleteReadError):
                    if attempt == num_attempts():
                        raise
            back_off(attempt)
        raise AssertionError("the last attempt returns or raises")


def _open(info: FileInfo) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Reader(info), READ_BUFFER_BYTES))


def _as_folder(key: str) -> str:
    return key.rstrip("/") + "/" if key.strip("/") else ""


def _is_hidden(key: str) -> bool:
    return any(part.startswith(".") for part in key.split("/"))


def _list_prefix(uri: str, prefix: str, *, with_markers: bool = False) -> list[FileInfo]:
    """Objects under a key prefix, sorted; without the empty objects that stand for folders, unless asked for."""
    bucket = split(uri)[0]
    found = []
    with clear_errors(uri):
        for page in client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                if with_markers or not item["Key"].endswith("/"):
                    found.append(FileInfo(f"{SCHEME}{bucket}/{item['Key']}", item["Size"], item["ETag"]))
    return sorted(found, key=lambda info: info.path)


def glob_regex(pattern: str) -> str:
    """A glob as a regular expression over the whole key, with the meaning of `glob.glob(recursive=True)`."""
    parts = []
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|[^*?\[]+|\[", pattern):
        if piece == "**/":
            parts.append("(?:[^/]+/)*")
        elif piece == "**":
            parts.append(".*")
        elif piece == "*":
            parts.append("[^/]*")
        elif piece == "?":
            parts.append("[^/]")
        elif piece.startswith("[") and piece != "[":
            parts.append(re.sub(r"^\(\?s:(.*)\)\\[zZ]$", r"\1", fnmatch.translate(piece)))
        else:
            parts.append(re.escape(piece))
    return "".join(parts)
