"""Files on a local disk and on S3 by the same calls: list, open, publish, delete.

A path is a local path or `s3://bucket/key`. What is published becomes visible as a whole or not at all: locally by a
rename, on S3 by one PUT, or by one upload in parts. Problems that the user can fix raise `InputError` with the path.
"""

import glob
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pyarrow as pa

from pipelines import s3_client, s3_objects
from pipelines.s3_objects import FileInfo
from workers.errors import InputError

NUM_TRANSFER_THREADS = 8
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def is_s3(path: str) -> bool:
    """Whether the path names an S3 object or prefix."""
    return path.startswith(s3_client.SCHEME)


def join(base: str, *names: str) -> str:
    """`base/name/...` for local paths and S3 URIs alike."""
    if is_s3(base):
        return "/".join([base.rstrip("/"), *(name.strip("/") for name in names)])
    return os.path.join(base, *names)


def real_path(path: str) -> str:
    """The path behind all links: two names of one local file have one; S3 has no links."""
    return path if is_s3(path) else os.path.realpath(path)


def exists(path: str) -> bool:
    """Whether a file, or a folder, is there; on S3 a folder is there when a file is below it."""
    if is_s3(path):
        return s3_objects.find(path) is not None or s3_objects.has_any(path)
    return os.path.exists(path)


def is_empty(folder: str) -> bool:
    """Whether nothing at all, dot names included, is in a folder; one that is missing is empty."""
    if is_s3(folder):
        return not s3_objects.has_any(folder)
    with _clear_errors(folder):
        return not os.path.lexists(folder) or not os.listdir(folder)


def find_file(path: str) -> FileInfo | None:
    """The file of exactly this path, or None."""
    if is_s3(path):
        return s3_objects.find(path)
    return _local_info(path) if os.path.isfile(path) else None


def list_folder(folder: str) -> list[FileInfo]:
    """All files below a folder at any depth, sorted by path, without dot names; a missing folder is empty.

    Links to folders are followed, as globs do, but for those that lead back to a folder that they lie in.
    """
    if is_s3(folder):
        return s3_objects.list_folder(folder)
    found = []
    with _clear_errors(folder):
        for parent, folders, names in os.walk(folder, onerror=_raise_unless_missing, followlinks=True):
            paths = {name: os.path.join(parent, name) for name in folders if not name.startswith(".")}
            folders[:] = [name for name, path in paths.items() if not _leads_back(path)]
            found += [_local_info(os.path.join(parent, name)) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda info: info.path)


def list_glob(pattern: str) -> list[FileInfo]:
    """The files that match a glob, sorted by path: `*` and `?` stay inside a path part, `**` does not; no dot names.

    Links to folders are followed as in `list_folder`.
    """
    if is_s3(pattern):
        return s3_objects.list_glob(pattern)
    if "**" in pattern:  # glob.glob follows links that lead back, on and on
        base = os.path.dirname(re.split(r"[*?\[]", pattern, maxsplit=1)[0]) or os.curdir
        wanted = os.path.relpath(pattern, base)
        return [info for info in list_folder(base) if matches_glob(os.path.relpath(info.path, base), wanted)]
    with _clear_errors(pattern):
        return [_local_info(path) for path in sorted(glob.glob(pattern)) if not os.path.isdir(path)]


def matches_glob(path: str, pattern: str) -> bool:
    """Whether a path, dot names included, matches a glob in the sense of `list_glob`."""
    return re.fullmatch(s3_objects.glob_regex(pattern), path) is not None


def open_read(path: str) -> BinaryIO:
    """Opens a file for reading, seekable.

    Raises:
        InputError: the file, or its bucket, does not exist or may not be read.
    """
    if is_s3(path):
        return s3_objects.open_read(path)
    with _clear_errors(path):
        return open(path, "rb")


def open_input(path: str) -> BinaryIO:
    """Opens a file for reading as a stream; `.gz` and `.zst` are decompressed on the way."""
    file = open_read(path)
    codec = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    return file if codec is None else cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(file, codec)))


def read_bytes(path: str) -> bytes:
    """The whole content of a file."""
    with open_read(path) as file:
        return file.read()


def publish_bytes(path: str, data: bytes) -> None:
    """Writes a file as a whole: readers see the old content or the new, never a half."""
    if is_s3(path):
        s3_objects.put_bytes(path, data)
        return
    with _local_temporary(path) as temporary, open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish_new(path: str, data: bytes) -> bool:
    """Writes a file as a whole unless there is one already; of several callers exactly one gets True.

    Args:
        data: what no other caller writes. On S3 an answer can be lost and the call repeated; the content then tells whose
            file it is.
    """
    if is_s3(path):
        return s3_objects.put_new(path, data)
    with _hidden_file(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links: the content follows the name
            return _create_new(path, data)
    return True


def _create_new(path: str, data: bytes) -> bool:
    try:
        with open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def publish_file(local_path: str, path: str) -> None:
    """Copies a local file to `path` as a whole; the local file stays."""
    if is_s3(path):
        s3_objects.put_file(local_path, path)
        return
    with _local_temporary(path) as temporary:
        shutil.copyfile(local_path, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())


def publish_folder(local_folder: str, folder: str, last: Sequence[str] = ()) -> None:
    """Copies the files of a local folder, at any depth, each as a whole and several at a time.

    Args:
        last: names of files that appear after all others and in this order, where they exist.
    """
    start = len(local_folder.rstrip(os.sep)) + 1
    names = [info.path[start:] for info in list_folder(local_folder)]

    def publish(name: str) -> None:
        publish_file(os.path.join(local_folder, name), join(folder, name))

    with ThreadPoolExecutor(NUM_TRANSFER_THREADS) as pool:
        list(pool.map(publish, [name for name in names if name not in last]))
    for name in last:
        if name in names:
            publish(name)


def download_folder(folder: str, files: Sequence[FileInfo], local_folder: str) -> None:
    """Copies files that a listing of a folder on S3 has found to a local folder, several at a time.

    Raises:
        InputError: a file has changed since it was listed, or cannot be read.
    """
    start = len(folder.rstrip("/")) + 1

    def download(info: FileInfo) -> None:
        local_path = os.path.join(local_folder, info.path[start:])
        os.makedirs(os.path.dirname(local_path), exist_ok=True)
        s3_objects.download(info, local_path)

    with ThreadPoolExecutor(NUM_TRANSFER_THREADS) as pool:
        list(pool.map(download, files))


def run_storage(folder: str) -> dict[str, Any]:
    """`storage_path` and `storage_filesystem` of Ray Train's `RunConfig` for checkpoints below `folder`.

    Raises:
        InputError: the bucket is missing or may not be used.
    """
    if not is_s3(folder):
        return {"storage_path": folder, "storage_filesystem": None}
    # Not as a URI: pyarrow would decode % and spaces in it, and would not know AWS_ENDPOINT_URL.
    path = folder[len(s3_client.SCHEME) :]
    return {"storage_path": path, "storage_filesystem": s3_client.arrow_filesystem(folder)}


def delete(path: str) -> None:
    """Deletes a file, or a folder with all that is below it; nothing happens when it is not there."""
    if is_s3(path):
        s3_objects.delete(path)
        return
    with _clear_errors(path):
        _delete_local(path)


def _leads_back(folder: str) -> bool:
    """Whether a folder is a link to a folder that it lies in: below it, everything would come again without end."""
    if not os.path.islink(folder):
        return False
    target = os.path.realpath(folder)
    parent = os.path.realpath(os.path.dirname(folder))
    return os.path.commonpath([target, parent]) == target


def _local_info(path: str) -> FileInfo:
    with _clear_errors(path):
        status = os.stat(path)
    return FileInfo(path, status.st_size, str(status.st_mtime_ns))


def _delete_local(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _local_temporary(path: str) -> Iterator[str]:
    """A hidden name beside `path` that is renamed to it when the block succeeds, and removed when it does not."""
    with _hidden_file(path) as temporary:
        yield temporary
        os.replace(temporary, path)


@contextmanager
def _hidden_file(path: str) -> Iterator[str]:
    """A name beside `path` that no listing shows; what is still there after the block is removed."""
    with _clear_errors(path):
        parent, name = os.path.split(os.path.abspath(path))
        os.makedirs(parent, exist_ok=True)
        temporary = os.path.join(parent, f".{name}.{uuid.uuid4().hex}.tmp")
        try:
            yield temporary
        finally:
            _delete_local(temporary)


@contextmanager
def _clear_errors(path: str) -> Iterator[None]:
    """Turns what a user can fix into `InputError`; anything else passes unchanged."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(path, "no such file or folder", "an existing path", "Check the spelling.") from error
    except PermissionError as error:
        raise InputError(path, "no permission", "a path this user may use") from error
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise InputError(path, str(error.strerror).lower(), "a path of the right kind") from error
