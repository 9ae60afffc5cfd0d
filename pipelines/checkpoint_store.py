"""The checkpoints of a stage: every rank writes its share, and Ray Train keeps the books of those that are whole."""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode

from workers.training.checkpoint import load_training_state, save_training_state
from workers.training.loop import Metrics


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
        """Loads the newest checkpoint, if there is one; returns the number of finished steps."""
        checkpoint = ray.train.get_checkpoint()
        return 0 if checkpoint is None else self._load(checkpoint)

    def restore_best(self) -> Metrics:
        """Loads the checkpoint with the lowest held-out loss, and returns the metrics that were saved with it."""
        reported = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        best = reported[-1]  # Ray Train has them in the order of their score, NaN first
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
            pyarrow.fs.copy_files(str(folder), path, destination_filesystem=self._storage.storage_filesystem)
            shutil.rmtree(folder)
        dist.barrier()
        ray.train.report(
            metrics.as_dict(),
            checkpoint=Checkpoint(path, self._storage.storage_filesystem),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def _load(self, checkpoint: Checkpoint) -> int:
        with checkpoint.as_directory() as folder:
            return load_training_state(self._engine, Path(folder))
