"""Model folders, local or on S3, as the local folders that `transformers` reads and writes.

A folder on S3 is copied once to the cache of a node, whoever asks for it there; a copy is named after the path and the versions
of all files, so it is never a stale one. On S3 `config.json` appears last and goes first: a folder without it is not whole, and
nobody takes it for a model.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from filelock import FileLock

from pipelines import storage
from pipelines.paths import cache_folder
from pipelines.s3_objects import FileInfo
from workers.errors import InputError
from workers.models.folder import MULTI_TOKEN_FILE

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")
_ROOM_TO_SPARE = 1 << 30


def exists(path: str) -> bool:
    """Whether a whole model folder is there."""
    if storage.is_s3(path):
        return storage.find_file(storage.join(path, _CONFIG)) is not None
    return os.path.isdir(path)


def fetch(path: str) -> str:
    """A local folder with the model: the path itself, or the node's copy of what is on S3.

    Raises:
        InputError: no model there, it changes meanwhile, or the node has no room for it.
    """
    return _fetch(path, has_weights=True) if storage.is_s3(path) else path


def fetch_facts(path: str) -> str:
    """As `fetch`, for those who do not load the weights: the copy of a folder on S3 has empty files in their place."""
    return _fetch(path, has_weights=False) if storage.is_s3(path) else path


@contextmanager
def facts(path: str) -> Iterator[str]:
    """`fetch_facts` for a `with` block; an `InputError` of the block that names the copy is raised with `path` instead."""
    folder = fetch_facts(path)
    try:
        yield folder
    except InputError as error:
        raise InputError(*(part.replace(folder, path) for part in error.args)) from error


@contextmanager
def staged(path: str) -> Iterator[str]:
    """A local folder name to write a model to; after the block it is at `path`. A block that fails leaves nothing there."""
    if not storage.is_s3(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="marsray-model-") as parent:
        folder = os.path.join(parent, "model")
        yield folder
        publish(folder, path)


def publish(local_folder: str, path: str) -> None:
    """Puts a local model folder onto S3 in place of what is at `path`."""
    storage.delete(storage.join(path, _CONFIG))
    storage.delete(path)
    storage.publish_folder(local_folder, path, last=(MULTI_TOKEN_FILE, _CONFIG))


def _fetch(path: str, *, has_weights: bool) -> str:
    files = storage.list_folder(path)
    if not any(info.path == storage.join(path, _CONFIG) for info in files):
        advice = "Check the path; an upload that has not come to its end has no config.json either."
        raise InputError(path, "no config.json", "a Hugging Face model folder", advice)
    whole = os.path.join(cache_folder(), "models", _copy_name(path, files))
    folder = whole if has_weights or os.path.isdir(whole) else f"{whole}-facts"
    if not os.path.isdir(folder):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        # Processes of one node that ask at the same time: the first copies, the others wait. A killed one's lock is open.
        with FileLock(f"{folder}.lock"):
            if not os.path.isdir(folder):
                _copy(path, files, folder, has_weights=has_weights)
    return folder


def _copy(path: str, files: Sequence[FileInfo], folder: str, *, has_weights: bool) -> None:
    unfinished = f"{folder}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    wanted = [info for info in files if has_weights or not info.path.endswith(_WEIGHTS)]
    size, free = sum(info.size for info in wanted), shutil.disk_usage(unfinished).free
    if size + _ROOM_TO_SPARE > free:
        advice = "Make room there, or set MARSRAY_CACHE to a folder on a larger disk."
        raise InputError(path, f"{size} bytes, with {free} free in {cache_folder()}", "room for a copy", advice)
    storage.download_folder(path, wanted, unfinished)
    for info in files:
        name = info.path[len(path.rstrip("/")) + 1 :]
        if info not in wanted and "/" not in name:  # empty weights tell `check_loadable` that there are some
            open(os.path.join(unfinished, name), "wb").close()
    os.rename(unfinished, folder)


def _copy_name(path: str, files: Sequence[FileInfo]) -> str:
    """The end of the path, for people, and a digest of path and versions."""
    content = [path.rstrip("/"), *([info.path, info.size, info.version] for info in files)]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    return f"{re.sub('[^A-Za-z0-9._-]', '_', path.rstrip('/').rsplit('/', 1)[-1])[:64]}-{digest}"
