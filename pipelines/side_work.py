"""Work that a job can do without: metric files, trackers, progress pages. It never stops the job, nor makes it wait."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_logger = logging.getLogger(__name__)


class SideWork:
    """Calls made one after the other in a thread of their own; the first that fails is told of, and the next one is tried.

    Args:
        name: what the calls are for, in the warning.
        warn: where the warning goes.
    """

    def __init__(self, name: str, warn: Callable[[str], None] = _logger.warning) -> None:
        self._name, self._warn = name, warn
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._newest: Future[Any] | None = None
        self._has_warned = self._is_finished = False

    @property
    def is_idle(self) -> bool:
        """Whether all calls so far have ended."""
        return self._newest is None or self._newest.done()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Makes a call after those that wait already; none after `finish`."""
        if self._is_finished:
            return
        self._newest = self._pool.submit(call, *arguments)
        self._newest.add_done_callback(self._look_at)

    def finish(self, seconds: float) -> None:
        """Waits for all calls, but no longer than this, and takes no more."""
        if self._newest is not None and wait([self._newest], timeout=seconds).not_done:
            self._warn(f"{self._name}: not finished after {seconds:g} s; going on without it")
        self._is_finished = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look_at(self, call: Future[Any]) -> None:
        if call.cancelled() or self._has_warned:
            return
        error = call.exception()
        if error is not None:
            self._has_warned = True
            self._warn(f"{self._name}: {type(error).__name__}: {error}; the job goes on, and this is said only once")
