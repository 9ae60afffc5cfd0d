"""S3 objects through boto3: what `pipelines.storage` calls for `s3://` paths.

`AWS_ENDPOINT_URL` and the usual credentials are honoured by boto3; failed calls are retried by botocore (standard mode,
with back-off).
"""

import fnmatch
import functools
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from workers.errors import InputError

SCHEME = "s3://"
READ_BUFFER_BYTES = 8 * 2**20
# S3 takes at most 5 GiB in one PUT; a multipart upload also becomes visible only when it is complete.
SINGLE_PUT_BYTES = 4 * 2**30
DELETE_BATCH = 1000


@dataclass(frozen=True)
class FileInfo:
    """One stored file. `version` changes when the content does: the modification time locally, the ETag on S3."""

    path: str
    size: int
    version: str


def find(uri: str) -> FileInfo | None:
    """The object of exactly this URI, or None."""
    bucket, key = _split(uri)
    with _clear_errors(uri):
        try:
            head = _client().head_object(Bucket=bucket, Key=key)
        except _exceptions().ClientError as error:
            # A HEAD answer has no body, so a missing bucket is also just "404" here; listing tells them apart.
            if error.response["Error"]["Code"] not in ("404", "NoSuchKey", "NotFound"):
                raise
            return None
    return FileInfo(uri, head["ContentLength"], head["ETag"])


def has_any(folder: str) -> bool:
    """Whether there is an object below a folder."""
    bucket, key = _split(folder)
    with _clear_errors(folder):
        answer = _client().list_objects_v2(Bucket=bucket, Prefix=_as_folder(key), MaxKeys=1)
    return bool(answer["KeyCount"])


def list_folder(folder: str) -> list[FileInfo]:
    """The objects below a folder, sorted by path, without those whose path from there on has a dot name."""
    key = _split(folder)[1]
    found = _list_prefix(folder, _as_folder(key))
    return [info for info in found if not _is_hidden(info.path[len(folder.rstrip("/")) :])]


def list_glob(pattern: str) -> list[FileInfo]:
    """The objects that match a glob, sorted by path."""
    key_pattern = _split(pattern)[1]
    matches = re.compile(glob_regex(key_pattern)).fullmatch
    prefix = re.split(r"[*?\[]", key_pattern, maxsplit=1)[0]
    start = prefix.rfind("/") + 1
    found = _list_prefix(pattern, prefix)
    keys = [_split(info.path)[1] for info in found]
    return [info for info, key in zip(found, keys, strict=True) if matches(key) and not _is_hidden(key[start:])]


def open_read(uri: str) -> BinaryIO:
    """A seekable reader that fetches ranges, so nothing is held beyond a buffer.

    Raises:
        InputError: no such object, or it may not be read.
    """
    info = find(uri)
    if info is None:
        raise InputError(uri, "no such object", "an existing S3 object", "Check the bucket and the key.")
    return cast(BinaryIO, io.BufferedReader(_Reader(info), READ_BUFFER_BYTES))


def put_bytes(uri: str, data: bytes) -> None:
    """Publishes an object by one PUT."""
    bucket, key = _split(uri)
    with _clear_errors(uri):
        _client().put_object(Bucket=bucket, Key=key, Body=data)


def put_file(local_path: str, uri: str) -> None:
    """Publishes a local file as an object, by one PUT up to `SINGLE_PUT_BYTES`."""
    from boto3.s3.transfer import TransferConfig

    bucket, key = _split(uri)
    with _clear_errors(uri):
        _client().upload_file(local_path, bucket, key, Config=TransferConfig(multipart_threshold=SINGLE_PUT_BYTES))


def delete(uri: str) -> None:
    """Deletes the object of this URI, and all below it as a folder."""
    bucket, key = _split(uri)
    keys = [_split(info.path)[1] for info in _list_prefix(uri, _as_folder(key), with_markers=True)]
    if key and not key.endswith("/"):
        keys.append(key)  # S3 accepts the deletion of a key that is not there
    for start in range(0, len(keys), DELETE_BATCH):
        batch = [{"Key": each} for each in keys[start : start + DELETE_BATCH]]
        with _clear_errors(uri):
            answer = _client().delete_objects(Bucket=bucket, Delete={"Objects": batch, "Quiet": True})
        if answer.get("Errors"):
            first = answer["Errors"][0]
            raise InputError(f"{SCHEME}{bucket}/{first['Key']}", first["Code"], "an object that may be deleted")


class _Reader(io.RawIOBase):
    """A view of one object by ranged GETs, pinned to the version that was found."""

    def __init__(self, info: FileInfo) -> None:
        self._info = info
        self._bucket, self._key = _split(info.path)
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
        with _clear_errors(self._info.path):
            answer = _client().get_object(
                Bucket=self._bucket,
                Key=self._key,
                Range=f"bytes={self._position}-{end - 1}",
                IfMatch=self._info.version,
            )
            data = answer["Body"].read()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _split(uri: str) -> tuple[str, str]:
    """The bucket and the key of a URI."""
    bucket, _, key = uri[len(SCHEME) :].partition("/")
    if not bucket:
        raise InputError(uri, "no bucket name", "s3://bucket/key")
    return bucket, key


def _as_folder(key: str) -> str:
    return key.rstrip("/") + "/" if key.strip("/") else ""


def _is_hidden(key: str) -> bool:
    return any(part.startswith(".") for part in key.split("/"))


def _list_prefix(uri: str, prefix: str, *, with_markers: bool = False) -> list[FileInfo]:
    """Objects under a key prefix, sorted; without the empty objects that stand for folders, unless asked for."""
    bucket = _split(uri)[0]
    found = []
    with _clear_errors(uri):
        for page in _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
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


def _exceptions() -> Any:
    import botocore.exceptions

    return botocore.exceptions


@functools.cache
def _client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=10))


@contextmanager
def _clear_errors(uri: str) -> Iterator[None]:
    """Turns what a user can fix (missing, denied, unreachable) into `InputError`; anything else passes unchanged."""
    exceptions = _exceptions()
    try:
        yield
    except exceptions.ClientError as error:
        raise _input_error(uri, error.response["Error"]["Code"]) or error from error.__cause__
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.TokenRetrievalError) as error:
        raise InputError(uri, f"no S3 credentials ({error})", "AWS credentials in the environment") from error
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        advice = "Check the network, AWS_ENDPOINT_URL and AWS_REGION."
        raise InputError(uri, f"no answer from S3 ({error})", "a reachable S3 endpoint", advice) from error


def _input_error(uri: str, code: str) -> InputError | None:
    """What the user can do about an error code of S3; None for a code that is not the user's."""
    if code == "NoSuchBucket":
        bucket = _split(uri)[0]
        return InputError(uri, f"no bucket {bucket!r}", "an existing bucket", "Check the name and AWS_ENDPOINT_URL.")
    if code in ("NoSuchKey", "404", "NotFound"):
        return InputError(uri, "no such object", "an existing S3 object", "Check the bucket and the key.")
    if code in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "Forbidden"):
        return InputError(uri, f"access denied ({code})", "credentials that may use this path")
    if code in ("PreconditionFailed", "412"):
        return InputError(uri, "an object that changed while it was read", "input that stays the same during a run")
    return None
