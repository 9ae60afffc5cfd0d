"""Where the first training worker posts its metrics: an actor that passes them on to the file, TensorBoard and a tracker.

Nothing here can stop or delay a training run: workers post without waiting, each outlet has a thread of its own, and a board that
is lost is started again from what the file holds.
"""

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines import storage
from pipelines.event_files import EventFiles
from pipelines.metrics_file import Line, MetricsFile, read_metrics
from pipelines.side_work import SideWork
from pipelines.trackers import Tracker, TrackerSettings

METRICS, GROUPS, EVENTS = "metrics.jsonl", "worker_groups.json", "tensorboard"
_NUM_RECENT = 20
_CLOSE_SECONDS = 30.0
_COUNTED = (
    "seconds",
    "samples",
    "response_tokens",
)  # counted by workers since they started, by the board since the stage began
_logger = logging.getLogger(__name__)


class _Outlet(Protocol):
    """A place that metric lines go to."""

    def restart(self, step: int, lines: Iterable[Line]) -> None:
        """Workers begin after `step` steps; `lines` are all that count so far."""

    def write(self, line: Line) -> None:
        """One more line."""

    def flush(self) -> None:
        """Time has passed."""

    def close(self, status: str) -> None:
        """The stage has ended: `finished`, `failed` or `stopped`."""


@dataclass(frozen=True)
class BoardSettings:
    """What a board is made from: the stage, its folder, local or on S3, and where its metrics go beside `metrics.jsonl`."""

    stage: str
    folder: str
    has_tensorboard: bool
    tracker: TrackerSettings | None


@dataclass
class BoardView:
    """What the driver sees: the newest lines, the facts of the newest worker group, and warnings that it has not seen yet."""

    lines: list[Line] = field(default_factory=list)
    group: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


class MetricsBoard:
    """Metric lines of one training stage, in order of their step; those of an earlier, killed run are taken up."""

    def __init__(self, settings: BoardSettings) -> None:
        path = storage.join(settings.folder, METRICS)
        self._groups_path = storage.join(settings.folder, GROUPS)
        self._lines = read_metrics(path)
        self._groups = read_groups(self._groups_path)
        self._before = self._counts_before(self._groups[-1]["first_step"]) if self._groups else {}
        self._refusal: tuple[str, ...] | None = None
        self._warnings: list[str] = []
        outlets: dict[str, _Outlet] = {METRICS: MetricsFile(path, self._lines)}
        if settings.has_tensorboard:
            outlets["TensorBoard"] = EventFiles(storage.join(settings.folder, EVENTS))
        if settings.tracker is not None:
            sent = self._lines[-1]["step"] if self._lines else 0
            outlets[settings.tracker.kind] = Tracker(settings.tracker, settings.stage, sent)
        self._outlets = [(outlet, SideWork(name, self._warnings.append)) for name, outlet in outlets.items()]

    def restart(self, group: dict[str, Any]) -> None:
        """A worker group starts: what an earlier one did beyond its first step is done again.

        Args:
            group: facts for the record; `first_step`, how many steps are finished, and `started`, a time that no other group has.
        """
        if self._groups and self._groups[-1]["started"] == group["started"]:
            return  # this actor was lost during the call, and Ray has repeated it
        self._refusal = None
        first_step = group["first_step"]
        last_step = self._lines[-1]["step"] if self._lines else 0
        self._groups.append({**group, "steps_done_again": max(0, last_step - first_step)})
        self._lines = [line for line in self._lines if line["step"] <= first_step]
        self._before = self._counts_before(first_step)
        metrics_file = self._outlets[0][1]
        metrics_file.submit(storage.publish_bytes, self._groups_path, json.dumps(self._groups, indent=1).encode())
        for outlet, side_work in self._outlets:
            side_work.submit(outlet.restart, first_step, list(self._lines))

    def post(self, line: Line) -> None:
        """Adds the metrics of one report."""
        if self._lines and line["step"] <= self._lines[-1]["step"]:
            return  # repeated by Ray, as above
        line = {**line, **{name: round(line[name] + self._before.get(name, 0), 3) for name in _COUNTED}}
        self._lines.append(line)
        for outlet, side_work in self._outlets:
            side_work.submit(outlet.write, line)

    def look(self) -> BoardView:
        """What there is to show."""
        for outlet, side_work in self._outlets:
            if side_work.is_idle:
                side_work.submit(outlet.flush)
        warnings = self._warnings.copy()
        del self._warnings[: len(warnings)]  # threads may have added to it
        return BoardView(self._lines[-_NUM_RECENT:], self._groups[-1] if self._groups else None, warnings)

    def last_step(self) -> int:
        """The newest step that was reported."""
        return int(self._lines[-1]["step"]) if self._lines else 0

    def close(self, status: str) -> list[str]:
        """Ends all outlets with the stage, which has `finished`, `failed` or been `stopped`; returns the last warnings."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        for outlet, side_work in self._outlets:
            side_work.submit(outlet.close, status)
        for _, side_work in self._outlets:
            side_work.finish(max(0.0, deadline - time.monotonic()))
        return self._warnings

    def refuse(self, arguments: tuple[str, ...]) -> None:
        """The stage cannot start: the arguments of an `InputError` for the driver to raise."""
        self._refusal = arguments

    def refusal(self) -> tuple[str, ...] | None:
        """Why the stage has not started, if it has not."""
        return self._refusal

    def _counts_before(self, first_step: int) -> dict[str, float]:
        before = [line for line in self._lines if line["step"] <= first_step]
        return {name: before[-1][name] for name in _COUNTED} if before else {}


def read_groups(path: str) -> list[dict[str, Any]]:
    """The facts of each group of workers that was started, from the stage's `worker_groups.json`."""
    groups: list[dict[str, Any]] = json.loads(storage.read_bytes(path)) if storage.exists(path) else []
    return groups


def status_of(kind: type[BaseException] | None) -> str:
    """How a block has ended, by the exception that left it: `finished`, `failed`, or `stopped` by the user or a signal."""
    if kind is None:
        return "finished"
    return "stopped" if issubclass(kind, KeyboardInterrupt | SystemExit) else "failed"


def start_board(settings: BoardSettings) -> Any:
    """The actor of a `MetricsBoard`, beside the driver if that can be: when it is lost, Ray starts it again."""
    driver_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(MetricsBoard)
    return actor.options(scheduling_strategy=driver_node).remote(settings)


class BoardClient:
    """What the first training worker tells the board. Only `finish` waits, and not for long.

    Args:
        board: the actor.
    """

    def __init__(self, board: Any) -> None:
        self._board = board
        self._calls: list[Any] = []
        self._is_lost = False
        self._facts: dict[str, Any] = {}
        self._started = time.time()
        self._num_samples = self._num_response_tokens = 0

    def describe(self, facts: dict[str, Any]) -> None:
        """Facts of the workers, which are posted with their start."""
        self._facts = facts

    def start(self, first_step: int) -> None:
        """The workers begin after `first_step` steps."""
        group = {"started": self._started, "first_step": first_step, **self._facts}
        self._calls.append(self._board.restart.remote(group))

    def post(self, metrics: dict[str, Any]) -> None:
        """Posts `Metrics` of the loop, with its numbers since the last report replaced by those since the workers started."""
        line = dict(metrics)
        self._num_samples += line.pop("num_samples")
        self._num_response_tokens += line.pop("num_response_tokens")
        line["samples"], line["response_tokens"] = self._num_samples, self._num_response_tokens
        line["seconds"] = round(time.time() - self._started, 3)
        self._calls.append(self._board.post.remote(line))
        self._look_at_calls(0.0)

    def finish(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Waits until the board has everything, but no longer than this."""
        self._look_at_calls(seconds)

    def _look_at_calls(self, seconds: float) -> None:
        if not self._calls:
            return
        done, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=seconds)
        for call in done:
            self._value_of(call)

    def _value_of(self, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except RayError as error:
            if not self._is_lost:
                _logger.warning("the metrics board is lost; training goes on without it (%s)", error)
            self._is_lost = True
            return None
