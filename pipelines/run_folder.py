"""The folder of a training run: who may write there, what is resumed, and where the newest example run is."""

import json
import logging
import os
import re
import tempfile
import uuid
from pathlib import Path
from typing import Any

from pipelines import storage
from pipelines.paths import home
from workers.config import Settings
from workers.errors import InputError

_SETTINGS, _INPUTS, _REPORT = "run.json", "inputs.json", "report.json"
# Fields that may change between a killed run and its continuation: they leave the weights alone.
# Another number of workers reads a converted checkpoint (`workers.training.checkpoint`); the samples of a step stay the same.
_FREE_FIELDS = {
    "run.output",
    "data.max_rejected_share",
    "run.log_every",
    "run.evaluate_every",
    "run.checkpoint_every",
    "run.num_to_keep",
    "run.tensorboard",
    "run.tracker",
    "run.tracker_project",
    "run.overwrite",
    "distributed.num_workers",
    "distributed.cpus_per_worker",
    "distributed.max_failures",
}
# What nobody could train again for nothing; and the data, prepared anew when its own fingerprint asks for it.
_TRAINED = re.compile(r"[^/]+/(checkpoints/step-|model/)")
_PREPARED = {"data", "held_out_data"}
_logger = logging.getLogger(__name__)


class RunFolder:
    """One training run on disk or on S3.

    Args:
        path: absolute local folder that all nodes share, or `s3://bucket/folder`.
        recipe: the resolved settings of this run.

    Raises:
        InputError: a path on S3 that cannot be a run's.
    """

    def __init__(self, path: str, recipe: Settings) -> None:
        self.path = _s3_folder(path) if storage.is_s3(path) else path
        self._settings = _flat(json.loads(recipe.model_dump_json()))

    def join(self, *parts: str) -> str:
        """A path inside the folder."""
        return storage.join(self.path, *parts)

    def check(self, *, overwrite: bool) -> None:
        """Refuses a folder that holds something else, or a run with other settings, or that cannot be written to.

        A run without a checkpoint may have had other settings: nothing of it is lost. Leaves everything as it was; something
        is made for a moment, since nothing else tells whether one may.

        Raises:
            InputError: names the first setting that differs.
        """
        self._require_writable()
        if storage.is_empty(self.path):
            return
        if not self._is_run():
            if overwrite:
                raise InputError("run.output", f"{self.path}, which no marsray run has made", "a run folder or none")
            raise InputError("run.output", f"{self.path}, a folder with other files", "a run folder, or a new one")
        if not overwrite:
            self._begins_anew()

    def _begins_anew(self) -> bool:
        """Whether the run in the folder has had other settings, and no checkpoint yet.

        Raises:
            InputError: it has one; names the first setting that differs.
        """
        before = json.loads(storage.read_bytes(self.join(_SETTINGS)))
        names = sorted(before.keys() | self._settings.keys())
        changed = [name for name in names if name not in _FREE_FIELDS and before.get(name) != self._settings.get(name)]
        if changed and any(_TRAINED.match(name) for name in self._names()):
            name = changed[0]
            raise InputError(
                name,
                json.dumps(self._settings.get(name)),
                f"{json.dumps(before.get(name))}, as in the run that {self.path} holds",
                "Repeat that run's settings to resume it, choose another run.output, or set run.overwrite=true.",
            )
        return bool(changed)

    def _names(self) -> list[str]:
        """The files in the folder, relative to it."""
        return [info.path[len(self.path) :].lstrip("/") for info in storage.list_folder(self.path)]

    def require_outside(self, where: str, path: str) -> None:
        """Refuses an input inside this folder, which `run.overwrite=true` would delete, or around it, which a run would change.

        Raises:
            InputError: names the setting.
        """
        if _is_inside(path, self.path):
            raise InputError(where, path, f"something outside run.output ({self.path})", "Choose another run.output.")
        if _is_inside(self.path, path):
            raise InputError("run.output", f"{self.path}, inside {where} ({path})", "a folder of its own")

    def _require_writable(self) -> None:
        """The folder itself, or the nearest one above that exists, must take new files; on S3, take and lose an object."""
        if storage.is_s3(self.path):
            probe = self.join(f".write-check-{uuid.uuid4().hex}")
            storage.publish_bytes(probe, b"")
            storage.delete(probe)
            return
        folder = Path(self.path)
        try:
            nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
            os.rmdir(tempfile.mkdtemp(prefix=".write-check-", dir=nearest))
        except OSError as error:  # also a name that is too long
            raise InputError(
                "run.output", f"{self.path}, which cannot be made ({error.strerror})", "a folder that can be written to"
            ) from error

    def finished_report(self) -> dict[str, Any] | None:
        """The report of this run when it is finished already."""
        if storage.find_file(self.report_path) is None:
            return None
        report: dict[str, Any] = json.loads(storage.read_bytes(self.report_path))
        return report

    def take(self, *, overwrite: bool) -> None:
        """Makes the folder this run's own; with `overwrite`, an earlier run in it is deleted.

        Raises:
            InputError: as `check`; another job may have been there since.
        """
        if overwrite:
            # The report goes first: what a kill leaves of the earlier run must not look finished.
            storage.delete(self.report_path)
            storage.delete(self.path)
        if self._is_run() and self._begins_anew():
            _logger.info("beginning anew in %s: it had other settings and no checkpoint", self.path)
            for name in sorted({name.split("/")[0] for name in self._names()} - {*_PREPARED, _SETTINGS}):
                storage.delete(self.join(name))
        elif self._is_run():
            _logger.info("resuming the run in %s", self.path)
        storage.publish_bytes(self.join(_SETTINGS), json.dumps(self._settings, indent=1).encode())

    def bind(self, inputs: dict[str, str]) -> None:
        """Ties the run to what it trains on; a continuation must have the same.

        Args:
            inputs: setting name -> fingerprint of what it points to.

        Raises:
            InputError: the content behind a setting has changed since the run began.
        """
        path = self.join(_INPUTS)
        if storage.find_file(path) is None:
            storage.publish_bytes(path, json.dumps(inputs, indent=1).encode())
            return
        before = json.loads(storage.read_bytes(path))
        for name, fingerprint in inputs.items():
            if before[name] != fingerprint:
                raise InputError(
                    name,
                    "files that have changed since this run began",
                    f"those that the run in {self.path} has trained on",
                    "Bring them back to resume, or set run.overwrite=true to start again.",
                )

    @property
    def report_path(self) -> str:
        """The report, written last: a run that has it is finished."""
        return self.join(_REPORT)

    def _is_run(self) -> bool:
        return storage.find_file(self.join(_SETTINGS)) is not None


def _s3_folder(path: str) -> str:
    """A run's path on S3 without slashes at its end. Ray Train takes a key for a path, so it has to look like one."""
    folder = path.rstrip("/")
    names = folder[len("s3://") :].split("/")
    if len(names) < 2 or any(name in ("", ".", "..") for name in names):
        raise InputError("run.output", path, "s3://bucket/folder, without empty parts, `.` and `..`")
    return folder


def _is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it; local ones are compared as the places that they lead to."""
    if storage.is_s3(path) or storage.is_s3(folder):
        return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
    return Path(path).resolve().is_relative_to(Path(folder).resolve())


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def newest_example_run() -> Path:
    """The newest finished run below `runs/` that trained on the embedded example: the default model of the other jobs.

    Raises:
        InputError: says how to make one.
    """
    reports = [
        report
        for pattern in ("runs/*/report.json", "runs/*/*/report.json")
        for report in home().glob(pattern)
        if (report.parent / "example").is_dir()
    ]
    if not reports:
        raise InputError(
            "model",
            f"null, and no finished example run below {home() / 'runs'}",
            "a model folder",
            "Give model=FOLDER, or make the default with `make quickstart` or `python jobs/train_mars.py`.",
        )
    return max(reports, key=lambda report: report.stat().st_mtime).parent
