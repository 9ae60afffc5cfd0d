"""The optional trackers, MLflow and Weights & Biases, through their own libraries: one tracker run for one run folder.

Metrics of a stage are named `stage/metric`. A run that is resumed goes on in the tracker run it began with; steps that are done
again after a restart are not sent a second time.
"""

import importlib.util
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipelines import storage
from pipelines.metrics_file import Line
from workers.config import RunSettings
from workers.errors import InputError

_RECORD = "tracker.json"
_PREFIXES = ("MLFLOW_", "WANDB_")
_MLFLOW_ADDRESS = "MLFLOW_TRACKING_URI"
_MLFLOW_PARAMETERS_PER_CALL, _MLFLOW_PARAMETER_LENGTH = 100, 6000  # limits of its REST API
_MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@dataclass(frozen=True)
class TrackerSettings:
    """What a tracker needs, to be sent to where it runs.

    Args:
        kind, project: as in the settings `run.tracker` and `run.tracker_project`.
        run_folder: local or on S3; the name of the tracker run is kept there.
        config: the flat settings of the run, without secrets.
        environment: the variables that set the tracker up; they may hold keys, so they are never shown.
    """

    kind: str
    project: str
    run_folder: str
    config: Mapping[str, Any]
    environment: Mapping[str, str] = field(repr=False)


def check_tracker(run: RunSettings) -> None:
    """Refuses a tracker whose package or address is missing.

    Raises:
        InputError: says what to install or to set.
    """
    if run.tracker == "none":
        return
    package = importlib.util.find_spec(run.tracker)
    if package is None or package.origin is None:  # a folder of that name, such as wandb's own output, is no package
        raise InputError(
            "run.tracker",
            f"{run.tracker}, but its Python package is not installed",
            "an installed tracker",
            f"pip install {run.tracker}, for this job and for the Ray workers too; or set run.tracker=none.",
        )
    if run.tracker == "mlflow" and not os.environ.get(_MLFLOW_ADDRESS):
        raise InputError(
            "run.tracker",
            f"mlflow, but {_MLFLOW_ADDRESS} is not set",
            "the address of a tracking server or store",
            f"export {_MLFLOW_ADDRESS}=http://HOST:5000, or sqlite:////ABSOLUTE/PATH/mlflow.db.",
        )


def tracker_settings(run: RunSettings, run_folder: str, config: Mapping[str, Any]) -> TrackerSettings | None:
    """What the tracker of a run needs, with the variables by which the user has set it up; None when there is none."""
    if run.tracker == "none":
        return None
    environment = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    return TrackerSettings(run.tracker, run.tracker_project, run_folder, config, environment)


class _TrackerRun(Protocol):
    """One run in a tracker, open for more points."""

    run_id: str

    def last_step(self, name: str) -> int:
        """The newest value of a metric that counts steps; 0 when there is none, or when the tracker does not say."""

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Sends the points of a step, by their full names."""

    def close(self, status: str) -> None:
        """Ends the run: `finished`, `failed` or `stopped`."""


class Tracker:
    """The metrics of one stage, on their way to a tracker. It connects with the first call.

    Args:
        settings: which tracker, and for which run.
        stage: the stage's name.
        sent_step: metrics up to this step are there already.
    """

    def __init__(self, settings: TrackerSettings, stage: str, sent_step: int) -> None:
        self._settings, self._stage, self._sent_step = settings, stage, sent_step
        self._run: _TrackerRun | None = None

    def restart(self, step: int, lines: Iterable[Line]) -> None:
        """Nothing to take back: what is done again gives the same points."""
        self._connected()

    def write(self, line: Line) -> None:
        """Sends the numbers of a line, unless its step was sent before."""
        run = self._connected()
        if line["step"] <= self._sent_step:
            return
        values = {f"{self._stage}/{name}": value for name, value in line.items() if isinstance(value, int | float)}
        run.log(self._stage, line["step"], values)
        self._sent_step = line["step"]

    def flush(self) -> None:
        """Trackers have their own pace."""

    def close(self, status: str) -> None:
        """Ends the tracker run; the next stage opens it again."""
        if self._run is not None:
            self._run.close(status)

    def _connected(self) -> _TrackerRun:
        if self._run is None:
            os.environ.update(self._settings.environment)
            earlier = self._recorded()
            key = f"{self._settings.kind}/{self._settings.project}"
            opened = _open_run(self._settings, earlier.get(key))
            if earlier.get(key) != opened.run_id:
                content = json.dumps({**earlier, key: opened.run_id}).encode()
                storage.publish_bytes(storage.join(self._settings.run_folder, _RECORD), content)
            self._sent_step = max(self._sent_step, opened.last_step(f"{self._stage}/step"))
            self._run = opened
        return self._run

    def _recorded(self) -> dict[str, str]:
        path = storage.join(self._settings.run_folder, _RECORD)
        recorded: dict[str, str] = json.loads(storage.read_bytes(path)) if storage.exists(path) else {}
        return recorded


def _open_run(settings: TrackerSettings, run_id: str | None) -> _TrackerRun:
    return _WandbRun(settings, run_id) if settings.kind == "wandb" else _MlflowRun(settings, run_id)


def _name_of(run_folder: str) -> str:
    return run_folder.rstrip("/").rsplit("/", 1)[-1]


class _MlflowRun:
    """A run of MLflow, through its client, which has no state of the process and sends nothing by itself."""

    def __init__(self, settings: TrackerSettings, run_id: str | None) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if run_id is None:
            self.run_id = self._new_run(settings)
        else:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")

    def _new_run(self, settings: TrackerSettings) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(settings.project)
        experiment_id = (
            self._client.create_experiment(settings.project) if experiment is None else experiment.experiment_id
        )
        run = self._client.create_run(experiment_id, run_name=_name_of(settings.run_folder))
        params = [Param(name, str(value)[:_MLFLOW_PARAMETER_LENGTH]) for name, value in settings.config.items()]
        for start in range(0, len(params), _MLFLOW_PARAMETERS_PER_CALL):
            self._client.log_batch(run.info.run_id, params=params[start : start + _MLFLOW_PARAMETERS_PER_CALL])
        return str(run.info.run_id)

    def last_step(self, name: str) -> int:
        metrics = self._client.get_run(self.run_id).data.metrics
        return int(metrics[name]) if name in metrics else 0

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status=_MLFLOW_STATUS[status])


class _WandbRun:
    """A run of Weights & Biases. Each stage has a step axis of its own, as one stage begins where the other has ended."""

    def __init__(self, settings: TrackerSettings, run_id: str | None) -> None:
        import wandb

        self._stages: set[str] = set()
        self.run_id = uuid.uuid4().hex[:12] if run_id is None else run_id
        self._run = wandb.init(
            project=settings.project,
            id=self.run_id,
            name=_name_of(settings.run_folder),
            resume="allow",
            config=dict(settings.config) if run_id is None else None,
            dir=None if "WANDB_DIR" in os.environ or storage.is_s3(settings.run_folder) else settings.run_folder,
            # Of the process itself nothing is sent: the command line of a Ray worker holds the password of the cluster's store.
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_meta=True, disable_job_creation=True
            ),
        )

    def last_step(self, name: str) -> int:
        return int(self._run.summary.get(name) or 0)  # empty when offline

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log(dict(values))

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
