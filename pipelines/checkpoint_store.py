"""The checkpoints of a stage: every rank writes its share, and Ray Train keeps the books of those that are whole."""

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode, ReportedCheckpoint

from pipelines import storage
from workers.training.checkpoint import load_training_state, save_training_state
from workers.training.loop import Metrics

_NAME = re.compile(r"step-\d+")
_BOOKS, _COPY = (
    "checkpoint_manager_snapshot.json",
    "checkpoint_manager_snapshot.before.json",
)  # the first is Ray Train's name


class CheckpointStore:
    """Saves and restores the state of an engine. Every rank has one, and all ranks must make the same calls.

    No rank reports a checkpoint before all have written it, so whatever is killed, and even where Ray Train goes on without a lost
    rank, a checkpoint that it knows is whole. One that it does not know is never loaded, and is deleted before it is written again.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._storage = ray.train.get_context().get_storage()
        self._is_local = isinstance(self._storage.storage_filesystem, pyarrow.fs.LocalFileSystem)
        # The name is a function of stage and rank: what a killed worker has left there, its successor deletes.
        stage = hashlib.sha256(self._storage.experiment_fs_path.encode()).hexdigest()[:16]
        self._staging = Path(tempfile.gettempdir()) / f"marsray-checkpoint-{stage}-{dist.get_rank()}"
        shutil.rmtree(self._staging, ignore_errors=True)

    def restore(self) -> int:
        """Loads the newest checkpoint, if there is one; returns the number of finished steps. Deletes what is no whole one."""
        checkpoint = ray.train.get_checkpoint()
        if dist.get_rank() == 0:
            self._delete_unknown()
        return 0 if checkpoint is None else self._load(checkpoint)

    def restore_best(self) -> Metrics:
        """Loads the checkpoint with the lowest held-out loss, and returns the metrics that were saved with it."""
        best = self._known()[-1]  # Ray Train has them in the order of their score, NaN first
        self._load(best.checkpoint)
        return Metrics(**best.metrics)

    def save(self, num_steps_done: int, metrics: Metrics) -> None:
        """Writes a checkpoint and makes it the newest. Ray Train may delete an older one for it."""
        name = f"step-{num_steps_done:08d}"
        path = self._storage.build_checkpoint_path_from_name(name)
        folder = Path(path) if self._is_local else self._staging
        if dist.get_rank() == 0 and self._is_local:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        folder.mkdir(parents=True, exist_ok=True)
        save_training_state(self._engine, folder, num_steps_done=num_steps_done)
        if not self._is_local:
            # One file after the other: pyarrow's threads can wait for each other in an upload to S3 (apache/arrow#32372).
            filesystem = self._storage.storage_filesystem
            pyarrow.fs.copy_files(str(folder), path, destination_filesystem=filesystem, use_threads=False)
            shutil.rmtree(folder)
        dist.barrier()
        if dist.get_rank() == 0 and self._is_local:
            self._known()  # waits until Ray Train has done with the checkpoint before
            keep_books(Path(self._storage.experiment_fs_path))
        ray.train.report(
            metrics.as_dict(),
            checkpoint=Checkpoint(path, self._storage.storage_filesystem),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def _known(self) -> list[ReportedCheckpoint]:
        return ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)

    def _delete_unknown(self) -> None:
        filesystem = self._storage.storage_filesystem
        known = {Path(reported.checkpoint.path).name for reported in self._known()}
        for info in filesystem.get_file_info(pyarrow.fs.FileSelector(self._storage.experiment_fs_path)):
            if _NAME.fullmatch(info.base_name) and info.base_name not in known:
                filesystem.delete_dir(info.path)

    def _load(self, checkpoint: Checkpoint) -> int:
        with checkpoint.as_directory() as folder:
            return load_training_state(self._engine, Path(folder), self._staging)


def keep_books(folder: Path) -> None:
    """Copies Ray Train's list of checkpoints, which it is not to be writing meanwhile, for `mend_books`."""
    if (folder / _BOOKS).exists():
        storage.publish_file(str(folder / _BOOKS), str(folder / _COPY))


def mend_books(folder: str) -> None:
    """Brings back the last whole version of Ray Train's list of checkpoints, when a kill has cut short the writing of a new one.

    Call it before Ray Train looks at `folder`, the one of the checkpoints. Ray Train writes the list in place, and refuses a broken
    one. It deletes checkpoints only after a new list is written, so all that the one before names are still there. On S3 a list
    appears as a whole.
    """
    books, copy = Path(folder) / _BOOKS, Path(folder) / _COPY
    if not books.exists():
        return
    try:
        json.loads(books.read_text())
    except ValueError:
        if copy.exists():
            storage.publish_file(str(copy), str(books))
        else:  # the very first one
            books.unlink()
