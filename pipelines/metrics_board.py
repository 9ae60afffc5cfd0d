"""Where the first training worker posts its metrics and the driver reads them: progress lines and `metrics.jsonl`."""

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from pipelines import storage
from pipelines.progress import Progress

_POLL_SECONDS = 0.5


@ray.remote(num_cpus=0, max_restarts=0)
class MetricsBoard:
    """Metric lines of one training stage, in order of their step."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines
        self._version = 0

    def restart(self, step: int) -> None:
        """A worker group starts after `step` finished steps: what an earlier group did beyond them is done again."""
        self._lines = [line for line in self._lines if line["step"] <= step]
        self._version += 1

    def post(self, line: dict[str, Any]) -> None:
        """Adds the metrics of one report."""
        self._lines.append(line)
        self._version += 1

    def read(self, version: int) -> tuple[int, list[dict[str, Any]] | None]:
        """The newest version, and the lines when they changed since `version`."""
        return self._version, self._lines if version != self._version else None


class BoardReader:
    """Follows a board from the driver, in a thread of its own. Use as a context manager.

    Args:
        title: what the progress line calls the stage.
        path: the stage's `metrics.jsonl`; lines of an earlier, killed run are taken up.
    """

    def __init__(self, title: str, path: str, num_steps: int) -> None:
        self._path, self._title, self._num_steps = path, title, num_steps
        self.lines = _read_lines(path)
        self.board = MetricsBoard.remote(self.lines)  # type: ignore[attr-defined]
        self._version = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        with Progress(self._title, self._num_steps, "steps") as progress:
            while not self._done.wait(_POLL_SECONDS):
                self._poll(progress)
            self._poll(progress)

    def _poll(self, progress: Progress) -> None:
        self._version, lines = ray.get(self.board.read.remote(self._version))
        if lines is None:
            return
        self.lines = lines
        storage.publish_bytes(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        if lines:
            last = lines[-1]
            progress.update(
                int(last["step"]),
                f"loss {last['loss']:.4f}  lr {last['learning_rate']:.2e}  "
                f"{last['response_tokens_per_second']:.0f} response tokens/s  data wait {last['data_wait_share']:.1%}",
            )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        ray.kill(self.board)


def _read_lines(path: str) -> list[dict[str, Any]]:
    if not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
