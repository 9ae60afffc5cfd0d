"""`report.html` of a run folder: written while the run goes on, and once more when it ends, well or not."""

import json
import logging
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import yaml
from pydantic import BaseModel

from pipelines import model_folders, storage
from pipelines.html_report import StageFacts, TrainingFacts, training_page
from pipelines.metrics_board import GROUPS, METRICS, read_groups, status_of
from pipelines.metrics_file import read_metrics
from pipelines.side_work import SideWork
from workers.config import Settings
from workers.errors import InputError

PAGE = "report.html"
_FINISH_SECONDS = 60.0
_SECRETS = ("key", "secret", "password", "passwd", "credential", "token")
_HIDDEN = "(hidden)"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PlannedStage:
    name: str
    num_steps: int
    epochs: float
    model: str


class TrainingPage:
    """The page of one run. As a context manager it says at the end how the run ended, without ever being the reason for that.

    Args:
        folder: the run folder, local or on S3.
        recipe: the resolved settings.
        model: what the run starts from.
        environment: versions and machine.
    """

    def __init__(self, folder: str, recipe: Settings, model: str, environment: Mapping[str, Any]) -> None:
        self.path = storage.join(folder, PAGE)
        self._folder, self._recipe, self._model, self._environment = folder, recipe, model, environment
        self._started = time.time()
        self._data: Mapping[str, Any] | None = None
        self._stages: list[_PlannedStage] = []
        self._writing = SideWork(PAGE)

    def set_data(self, data: Mapping[str, Any]) -> None:
        """The prepared data, as in `report.json`."""
        self._data = data

    def add_stage(self, name: str, *, num_steps: int, epochs: float, model: str) -> None:
        """A stage begins, or is found done; `model` is the folder that it publishes at its end."""
        self._stages.append(_PlannedStage(name, num_steps, epochs, model))

    def refresh(self) -> None:
        """Has the page written as things stand now, unless that is being done; does not wait for it."""
        if self._writing.is_idle:
            self._writing.submit(self._write, "running", "", None)

    def _write(self, state: str, reason: str, exit_code: int | None) -> None:
        facts = TrainingFacts(
            model=self._model,
            output=self._folder,
            state=state,
            reason=reason,
            exit_code=exit_code,
            started=_clock(self._started),
            updated=f"{_clock(time.time())} on {platform.node()}",
            seconds=time.time() - self._started,
            data=self._data,
            stages=[self._facts_of(stage) for stage in self._stages],
            changed_settings=changed_settings(self._recipe),
            recipe=yaml.safe_dump(without_secrets(json.loads(self._recipe.model_dump_json())), sort_keys=False),
            environment=self._environment,
        )
        storage.publish_bytes(self.path, training_page(facts).encode())

    def _facts_of(self, stage: _PlannedStage) -> StageFacts:
        folder = storage.join(self._folder, stage.name)
        groups = read_groups(storage.join(folder, GROUPS))
        return StageFacts(
            name=stage.name,
            num_steps=stage.num_steps,
            epochs=stage.epochs,
            lines=read_metrics(storage.join(folder, METRICS)),
            groups=[{**group, "time": _clock(group["started"])} for group in groups],
            is_done=model_folders.exists(stage.model),
        )

    def __enter__(self) -> Self:
        self.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = status_of(kind)
        exit_code = 0 if kind is None else 2 if issubclass(kind, InputError) else 1
        self._writing.submit(
            self._write, status, "" if error is None else f"{type(error).__name__}: {error}", exit_code
        )
        self._writing.finish(_FINISH_SECONDS)


def changed_settings(recipe: Settings) -> list[tuple[str, str, str]]:
    """(name, value, default) of each setting that has another value than its default, in the order of the settings."""
    changed = [(name, value, default) for name, value, default in _fields(recipe) if value != default]
    hidden = [(name, without_secrets(value, is_free=True), default) for name, value, default in changed]
    return [(name, _as_text(value), _as_text(default)) for name, value, default in hidden]


def without_secrets(value: Any, *, is_free: bool = False) -> Any:
    """The same settings; in free mappings, such as options passed on to DeepSpeed, values whose names sound secret are hidden."""
    if isinstance(value, list):
        return [without_secrets(each, is_free=is_free) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _HIDDEN
        if is_free and any(word in name.lower() for word in _SECRETS)
        else without_secrets(each, is_free=is_free or name == "deepspeed")
        for name, each in value.items()
    }


def flat_config(recipe: Settings) -> dict[str, Any]:
    """Each setting by its dotted name, without secrets: for trackers."""
    return {name: without_secrets(value, is_free=True) for name, value, _ in _fields(recipe)}


def _fields(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True)
            yield f"{prefix}{name}", value, default


def _as_text(value: Any) -> str:
    return json.dumps(value, default=list)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
