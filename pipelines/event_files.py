"""TensorBoard event files of a training stage: one tag for each metric, whatever was restarted in between."""

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines import storage
from pipelines.metrics_file import Line

_SECONDS_BETWEEN_UPLOADS = 60.0
_FLUSH_SECONDS = 5


class EventFiles:
    """Event files in a folder, local or on S3; for S3 they are written locally and sent now and then, and at the end.

    Each start makes a file of its own. It opens with a mark by which TensorBoard drops all points of the steps that are done again.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._copy = tempfile.TemporaryDirectory(prefix="marsray-tensorboard-") if storage.is_s3(folder) else None
        self._local = Path(folder if self._copy is None else self._copy.name)
        self._writer: Any = None
        self._next_upload = 0.0

    def restart(self, step: int, lines: Iterable[Line]) -> None:
        """Points beyond `step` count no more."""
        self._end_file()
        self._open(step + 1)

    def write(self, line: Line) -> None:
        """Adds one point for each number of the line."""
        if self._writer is None:
            self._open(line["step"])
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])
        self.flush()

    def flush(self) -> None:
        """Sends to S3 what has waited long enough."""
        if self._copy is not None and self._writer is not None and time.monotonic() >= self._next_upload:
            self._upload()

    def close(self, status: str) -> None:
        """Ends the newest file."""
        self._end_file()
        if self._copy is not None:
            self._copy.cleanup()

    def _open(self, purge_step: int) -> None:
        from tensorboardX import SummaryWriter  # comes with Ray Train, and needs no torch

        # Files are read in the order of their names: the second of their start, then the host, then this number.
        number = len(storage.list_folder(self._folder))
        self._writer = SummaryWriter(
            str(self._local), purge_step=purge_step, filename_suffix=f".{number:06d}", flush_secs=_FLUSH_SECONDS
        )

    def _end_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()  # before the upload: it waits until all points are in the file
        self._writer = None
        if self._copy is not None:
            self._upload()

    def _upload(self) -> None:
        self._next_upload = time.monotonic() + _SECONDS_BETWEEN_UPLOADS
        newest = max(self._local.iterdir())
        storage.publish_file(str(newest), storage.join(self._folder, newest.name))
