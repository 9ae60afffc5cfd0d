"""MLflow and Weights & Biases through stand-ins that record each call; the real packages are optional and not needed here."""

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from training_facts import metric_line

from jobs import train_mars
from pipelines import trackers
from pipelines.trackers import Tracker, TrackerSettings, check_tracker, tracker_settings
from pipelines.training_page import flat_config
from workers.config import DistributedSettings, RunSettings, TrainSftRecipe
from workers.errors import InputError


class FakeMlflow:
    """As much of MLflow's client as a tracking server would remember."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.params: dict[str, dict[str, str]] = {}
        self.points: dict[str, list[tuple[str, int, float]]] = {}
        self.statuses: dict[str, list[str]] = {}
        self.num_param_calls = 0
        self.is_down = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it where `import mlflow` finds it."""
        mlflow, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
        mlflow.__spec__ = importlib.machinery.ModuleSpec("mlflow", None, origin="fake")
        mlflow.MlflowClient = lambda: self
        entities.Metric = lambda key, value, timestamp, step: (key, step, value)
        entities.Param = lambda key, value: (key, value)
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return None if found is None else types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        run_id = f"{experiment_id}-{len(self.params)}"
        self.params[run_id], self.points[run_id], self.statuses[run_id] = {}, [], ["RUNNING"]
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if self.is_down:
            raise ConnectionError("no answer")
        assert len(params) <= 100
        assert all(isinstance(value, str) and len(value) <= 6000 for _, value in params)
        self.num_param_calls += bool(params)
        self.params[run_id].update(params)
        self.points[run_id].extend(metrics)

    def get_run(self, run_id: str) -> Any:
        newest = {key: value for key, _, value in sorted(self.points[run_id], key=lambda point: point[1])}
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=newest))

    def update_run(self, run_id: str, status: str) -> None:
        self.statuses[run_id].append(status)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.statuses[run_id].append(status)


class FakeWandb:
    """The runs that `wandb.init` was asked for, each with what was logged to it."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.defined: list[tuple[str, str]] = []
        self.exit_codes: list[int] = []
        self.summary: dict[str, float] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it where `import wandb` finds it."""
        wandb = types.ModuleType("wandb")
        wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="fake")
        wandb.Settings = lambda **values: values
        wandb.init = self.init
        monkeypatch.setitem(sys.modules, "wandb", wandb)

    def init(self, **values: Any) -> "FakeWandb":
        self.inits.append(values)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)
        self.summary.update(values)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def settings_of(kind: str, folder: Path, **changes: Any) -> TrackerSettings:
    values = {"project": "adders", "config": {"run.seed": 0}, "environment": {}}
    return TrackerSettings(kind=kind, run_folder=str(folder), **values | changes)


def follow(settings: TrackerSettings, stage: str, steps: range, status: str, *, sent_step: int = 0) -> None:
    """One actor's worth of a stage."""
    tracker = Tracker(settings, stage, sent_step)
    tracker.restart(steps[0] - 1, [])
    for step in steps:
        tracker.write(metric_line(step))
    tracker.close(status)


def test_mlflow_gets_one_run_for_all_stages_and_restarts(monkeypatch, tmp_path):
    server = FakeMlflow()
    server.install(monkeypatch)
    config = {f"data.field_{number}": number for number in range(150)}
    settings = settings_of("mlflow", tmp_path, config=config)
    follow(settings, "sft", range(1, 3), "finished")
    follow(settings, "mars", range(1, 6), "stopped")
    follow(settings, "mars", range(4, 8), "failed")  # steps 4 and 5 are done again
    (points,) = server.points.values()
    assert [step for name, step, _ in points if name == "sft/loss"] == [1, 2]
    assert [step for name, step, _ in points if name == "mars/loss"] == [1, 2, 3, 4, 5, 6, 7]
    assert ("mars/learning_rate", 7, pytest.approx(1e-4 / 7)) in points
    assert not [point for point in points if "held_out" in point[0]]  # null in these lines
    assert server.params == {"0-0": {name: str(value) for name, value in config.items()}}
    assert server.num_param_calls == 2
    assert server.statuses["0-0"] == ["RUNNING", "FINISHED", "RUNNING", "KILLED", "RUNNING", "FAILED"]


def test_wandb_gets_one_run_with_a_step_axis_for_each_stage(monkeypatch, tmp_path):
    wandb = FakeWandb()
    wandb.install(monkeypatch)
    settings = settings_of("wandb", tmp_path)
    follow(settings, "sft", range(1, 3), "finished")
    follow(settings, "mars", range(1, 4), "failed")
    follow(settings, "mars", range(3, 5), "finished")
    assert len({call["id"] for call in wandb.inits}) == 1
    assert [call["config"] for call in wandb.inits] == [{"run.seed": 0}, None, None]
    assert {call["resume"] for call in wandb.inits} == {"allow"}
    assert [line["mars/step"] for line in wandb.logged if "mars/step" in line] == [1, 2, 3, 4]
    assert wandb.defined == [("sft/*", "sft/step"), ("mars/*", "mars/step"), ("mars/*", "mars/step")]
    assert wandb.exit_codes == [0, 1, 0]


def test_an_offline_tracker_that_remembers_nothing_gets_no_step_twice(monkeypatch, tmp_path):
    wandb = FakeWandb()
    wandb.install(monkeypatch)
    follow(settings_of("wandb", tmp_path), "mars", range(4, 8), "finished", sent_step=5)
    assert [line["mars/step"] for line in wandb.logged] == [6, 7]


def test_another_project_or_tracker_gets_a_run_of_its_own(monkeypatch, tmp_path):
    server, wandb = FakeMlflow(), FakeWandb()
    server.install(monkeypatch)
    wandb.install(monkeypatch)
    follow(settings_of("mlflow", tmp_path), "sft", range(1, 2), "finished")
    follow(settings_of("wandb", tmp_path), "sft", range(1, 2), "finished")
    follow(settings_of("mlflow", tmp_path, project="others"), "sft", range(1, 2), "finished")
    follow(settings_of("mlflow", tmp_path), "mars", range(1, 2), "finished")
    assert list(server.points) == ["0-0", "1-1"]
    assert {name for name, _, _ in server.points["0-0"] if name.endswith("/loss")} == {"sft/loss", "mars/loss"}


def test_a_server_that_comes_back_gets_what_follows(monkeypatch, tmp_path):
    server = FakeMlflow()
    server.install(monkeypatch)
    tracker = Tracker(settings_of("mlflow", tmp_path), "mars", 0)
    tracker.write(metric_line(1))
    server.is_down = True
    with pytest.raises(ConnectionError):
        tracker.write(metric_line(2))
    server.is_down = False
    tracker.write(metric_line(3))
    assert [step for name, step, _ in server.points["0-0"] if name == "mars/loss"] == [1, 3]


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_missing_package_is_refused_before_anything_starts(kind, monkeypatch, tmp_path, caplog):
    """A folder named `wandb`, which that package itself leaves where a job has run, is no package."""
    (tmp_path / kind).mkdir()
    everywhere = importlib.util.find_spec
    monkeypatch.setattr(
        trackers.importlib.util,
        "find_spec",
        lambda name, *rest: (
            importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)]) if name == kind else everywhere(name, *rest)
        ),
    )
    for mode in ([], ["--dry-run"]):
        assert train_mars.main([f"run.tracker={kind}", f"run.output={tmp_path / 'run'}", *mode]) == 2
        assert f"pip install {kind}, for this job and for the Ray workers too" in caplog.text
        caplog.clear()
    assert not (tmp_path / "run").exists()


def test_mlflow_without_an_address_is_refused(monkeypatch):
    """Its default is a folder below the current one, which for an actor is nowhere that anybody looks."""
    FakeMlflow().install(monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(InputError, match="MLFLOW_TRACKING_URI"):
        check_tracker(RunSettings(tracker="mlflow"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    check_tracker(RunSettings(tracker="mlflow"))
    check_tracker(RunSettings())


def test_no_secret_is_logged_or_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "hush-1")
    options = {"comet": {"api_key": "hush-2", "project": "adders"}, "train_batch_size": 8}
    config = flat_config(TrainSftRecipe(distributed=DistributedSettings(deepspeed=options)))
    settings = tracker_settings(RunSettings(tracker="wandb"), str(tmp_path), config)
    assert settings is not None
    assert settings.environment["WANDB_API_KEY"] == "hush-1"
    assert "hush-1" not in repr(settings)
    assert "hush" not in str(config)
    assert tracker_settings(RunSettings(), str(tmp_path), config) is None
    assert config["distributed.deepspeed"] == {
        "comet": {"api_key": "(hidden)", "project": "adders"},
        "train_batch_size": 8,
    }
    assert config["model.mask_token"] == "auto"
    assert config["training.row_tokens"] == 512
