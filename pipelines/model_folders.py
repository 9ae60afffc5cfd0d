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

_CONFIG, _GGUF = "config.json", ".gguf"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", _GGUF)
_ROOM_TO_SPARE = 1 << 30


def exists(path: str) -> bool:
    """Whether a whole model folder is there."""
    if storage.is_s3(path):
        return storage.find_file(storage.join(path, _CONFIG)) is not None
    return os.path.isdir(path)


def fetch(path: str) -> str:
    """A local folder with the model, or its .gguf file: the path itself, or the node's copy of what is on S3.

    Raises:
        InputError: no model there, it changes meanwhile, or the node has no room for it.
    """
    if not storage.is_s3(path):
        return path
    if path.endswith(_GGUF):
        return _fetch_file(path)
    return _copy_of(path, _list_model(path), has_weights=True)


def fetch_facts(path: str) -> str:
    """As `fetch`, for those who do not load the weights: the copy of a folder on S3 has empty files in their place."""
    if not storage.is_s3(path):
        return path
    files = _list_model(path)
    whole = _copy_name(path, files, has_weights=True)
    return whole if os.path.isdir(whole) else _copy_of(path, files, has_weights=False)


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


def _list_model(path: str) -> list[FileInfo]:
    files = storage.list_folder(path)
    if not any(info.path == storage.join(path, _CONFIG) for info in files):
        inner = next((info.path for info in files if info.path.endswith(f"/model/{_CONFIG}")), None)
        advice = "Check the path; an upload that has not come to its end has no config.json either."
        if inner is not None:  # the folder of a run, or of a stage of it
            advice = f"Did you mean {inner.removesuffix(f'/{_CONFIG}')}?"
        raise InputError(path, "no config.json", "a Hugging Face model folder", advice)
    return files


def _fetch_file(path: str) -> str:
    info = storage.find_file(path)
    if info is None:
        raise InputError(path, "no such object", "an existing file", "Check the bucket and the key.")
    parent, _, name = path.rpartition("/")
    return os.path.join(_copy_of(parent, [info], has_weights=True), name)


def _copy_of(path: str, files: Sequence[FileInfo], *, has_weights: bool) -> str:
    """The node's copy of these files of a folder; made now if there is none."""
    folder = _copy_name(path, files, has_weights=has_weights)
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


def _copy_name(path: str, files: Sequence[FileInfo], *, has_weights: bool) -> str:
    """In the cache, named by the end of the path, for people, and a digest of path and versions."""
    content = [path.rstrip("/"), *([info.path, info.size, info.version] for info in files)]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    label = re.sub("[^A-Za-z0-9._-]", "_", path.rstrip("/").rsplit("/", 1)[-1])[:64]
    return os.path.join(cache_folder(), "models", f"{label}-{digest}" + ("" if has_weights else "-facts"))
