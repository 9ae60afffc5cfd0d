"""The driver's view of a training stage while it runs: progress on the console, and a page that is made anew now and then."""

import logging
import threading
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError

from pipelines import storage
from pipelines.metrics_board import GROUPS, BoardSettings, BoardView, read_groups, start_board, status_of
from pipelines.metrics_file import Line
from pipelines.progress import Progress
from pipelines.stage_summary import duration, seconds_left

_POLL_SECONDS, _ANSWER_SECONDS, _CLOSE_SECONDS = 0.5, 10.0, 40.0
_PAGE_SECONDS = 60.0
_logger = logging.getLogger(__name__)


class StageWatch:
    """Holds the metrics board of a stage and shows what is on it, from a thread of its own. Use as a context manager.

    Args:
        settings: of the board.
        num_steps: steps of the stage.
        pace: tokens per epoch, steps and ranks in words, for the first line.
        make_page: called about once a minute; must not wait.
    """

    def __init__(self, settings: BoardSettings, *, num_steps: int, pace: str, make_page: Callable[[], None]) -> None:
        self._title, self._num_steps = settings.stage, num_steps
        earlier = [group["started"] for group in read_groups(storage.join(settings.folder, GROUPS))]
        self._console = StageConsole(self._title, num_steps, pace, earlier)
        self._make_page, self._next_page = make_page, 0.0
        self._is_lost = self._is_silent = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.board = start_board(settings)

    def refusal(self) -> tuple[str, ...] | None:
        """The arguments of an `InputError`, when the workers could not begin."""
        refusal: tuple[str, ...] | None = self._ask(self.board.refusal.remote())
        return refusal

    def last_step(self) -> int:
        """The newest step that was reported."""
        return self._ask(self.board.last_step.remote()) or 0

    def _follow(self) -> None:
        with Progress(self._title, self._num_steps, "steps") as progress:
            while True:
                is_last_look = self._done.wait(_POLL_SECONDS)
                view: BoardView | None = None if self._is_lost else self._ask(self.board.look.remote())
                if view is not None:
                    self._console.show(view, progress)
                if time.monotonic() >= self._next_page:
                    self._next_page = time.monotonic() + _PAGE_SECONDS
                    self._make_page()
                if is_last_look:
                    return

    def _ask(self, answer: Any, seconds: float | None = None) -> Any:
        """What the board answers, or None when it cannot."""
        try:
            value = ray.get(answer, timeout=_ANSWER_SECONDS if seconds is None else seconds)
        except GetTimeoutError:
            self._is_silent = True
            return None
        except RayError as error:
            if not self._is_lost:
                _logger.warning("%s: the metrics board is lost; training goes on unseen (%s)", self._title, error)
            self._is_lost = True
            return None
        self._is_silent = False
        return value

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        # One that has not answered the last question is not going to, and Ray ends this process when it has been gone for a minute.
        seconds = 0.0 if self._is_silent else _CLOSE_SECONDS
        for warning in self._ask(self.board.close.remote(status_of(kind)), seconds) or ():
            _logger.warning("%s: %s", self._title, warning)
        ray.kill(self.board)


class StageConsole:
    """Turns what is on the board into progress lines, each thing once.

    Args:
        earlier: when the worker groups of earlier runs have started: while theirs is the newest, there is nothing to show.
    """

    def __init__(self, title: str, num_steps: int, pace: str, earlier: Collection[float] = ()) -> None:
        self._title, self._num_steps, self._pace = title, num_steps, pace
        self._earlier = frozenset(earlier)
        self._shown_step = 0
        self._shown_held_out = 0
        self._shown_group: Any = None

    def show(self, view: BoardView, progress: Progress) -> None:
        """Shows what is new."""
        for warning in view.warnings:
            _logger.warning("%s: %s", self._title, warning)
        if view.group is None or view.group["started"] in self._earlier:
            return  # what is on the board is of a run before this one
        if view.group["started"] != self._shown_group:
            self._show_group(view.group)
        if view.lines and view.lines[-1]["step"] != self._shown_step:
            line = view.lines[-1]
            held_out = [line for line in view.lines if line.get("held_out_loss") is not None]
            note = _note(line)
            if held_out and held_out[-1]["step"] > self._shown_held_out:
                self._shown_held_out = held_out[-1]["step"]
                note += f"  held-out loss {held_out[-1]['held_out_loss']:.4f} (step {self._shown_held_out})"
            left = seconds_left(view.lines, self._num_steps)
            if left is not None and line["step"] < self._num_steps:
                note += f"  {duration(left)} left"
            self._shown_step = line["step"]
            progress.update(line["step"], note)

    def _show_group(self, group: dict[str, Any]) -> None:
        first_step = group["first_step"]
        if self._shown_group is None:
            _logger.info(
                "%s: training %s of %s parameters on %s; %s",
                self._title,
                f"{group['trainable_parameters']:,}",
                f"{group['parameters']:,}",
                group["device"],
                self._pace,
            )
        if first_step or self._shown_group is not None:
            again = group["steps_done_again"]
            note = f"; at least {again} steps are done again" if again else ""
            _logger.info("%s: going on after step %d%s", self._title, first_step, note)
            self._shown_step, self._shown_held_out = first_step, min(self._shown_held_out, first_step)
        self._shown_group = group["started"]


def _note(line: Line) -> str:
    return (
        f"loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}  "
        f"{line['response_tokens_per_second']:.0f} response tokens/s  data wait {line['data_wait_share']:.1%}"
    )
