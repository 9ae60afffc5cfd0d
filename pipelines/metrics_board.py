"""Where the first training worker posts its metrics, which keeps `metrics.jsonl` and lets the driver show progress."""

import json
import logging
import threading
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError

from pipelines import storage
from pipelines.progress import Progress

_POLL_SECONDS = 0.5
_logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0)
class MetricsBoard:
    """Metric lines of one training stage, in order of their step; the file is whole after every call.

    Args:
        path: the stage's `metrics.jsonl`; lines of an earlier, killed run are taken up.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines = read_metrics(path)
        self._refusal: tuple[str, ...] | None = None

    def restart(self, step: int) -> None:
        """A worker group starts after `step` finished steps: what an earlier group did beyond them is done again."""
        self._lines = [line for line in self._lines if line["step"] <= step]
        storage.publish_bytes(self._path, "".join(map(_as_json, self._lines)).encode())

    def post(self, line: dict[str, Any]) -> None:
        """Adds the metrics of one report."""
        self._lines.append(line)
        if storage.is_s3(self._path):  # nothing can be appended there
            storage.publish_bytes(self._path, "".join(map(_as_json, self._lines)).encode())
            return
        with open(self._path, "a") as file:
            file.write(_as_json(line))

    def last(self) -> dict[str, Any] | None:
        """The newest line."""
        return self._lines[-1] if self._lines else None

    def refuse(self, arguments: tuple[str, ...]) -> None:
        """The stage cannot start: the arguments of an `InputError` for the driver to raise."""
        self._refusal = arguments

    def refusal(self) -> tuple[str, ...] | None:
        """Why the stage has not started, if it has not."""
        return self._refusal


def _as_json(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; one that a kill has cut short is left out, and will be written again."""
    if storage.find_file(path) is None:
        return []
    lines = storage.read_bytes(path).decode().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class ProgressFollower:
    """Shows the board's newest line in the driver, from a thread of its own. Use as a context manager."""

    def __init__(self, board: Any, title: str, num_steps: int) -> None:
        self._board, self._title, self._num_steps = board, title, num_steps
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        shown = 0
        with Progress(self._title, self._num_steps, "steps") as progress:
            while True:
                is_last_look = self._done.wait(_POLL_SECONDS)
                try:
                    line = ray.get(self._board.last.remote())
                except RayError as error:
                    _logger.warning("%s: no more progress lines (%s)", self._title, error)
                    return
                if line is not None and line["step"] != shown:
                    if line["step"] < shown:
                        _logger.info("%s: going on from the checkpoint before step %d", self._title, shown)
                    shown = int(line["step"])
                    progress.update(shown, _summary(line))
                if is_last_look:
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()


def _summary(line: dict[str, Any]) -> str:
    return (
        f"loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}  "
        f"{line['response_tokens_per_second']:.0f} response tokens/s  data wait {line['data_wait_share']:.1%}"
    )
