"""SIGTERM and SIGINT, by which `ray job stop`, Kubernetes, Slurm and Ctrl-C ask a job to end."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import FrameType, TracebackType
from typing import Any, Self

from workers.errors import Stopped

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SECONDS_BETWEEN_LOOKS = 0.2


class StopSignals:
    """Hears the stop signals of the process while it is entered. Outside of the main thread it hears none.

    A signal ends what the main thread does with `Stopped`. While `run` works, the first one is passed on instead, so that the work
    can end in order, and only the next one ends it at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._passes_on = self._is_aborted = False
        self._earlier: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Takes the signals, also from a library that has taken them in the meantime."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._receive)

    def run(self, work: Callable[[], object], on_stop: Callable[[str], None]) -> None:
        """Does `work` in a thread of its own, and calls `on_stop` in this one with the name of the first signal.

        Ray Train takes SIGINT for itself when it runs in the main thread.

        Raises:
            Stopped: a signal has come before, or a second one now, or `on_stop` raises it; `work` is then left alone.
        """
        self._passes_on = True
        try:
            if self.received is not None:
                raise Stopped(f"stopped by {self.received}")
            result = _in_a_daemon_thread(work)
            is_told = False
            while not result.done():
                if self._is_aborted:
                    raise Stopped("ended at once")
                if self.received is not None and not is_told:
                    is_told = True
                    on_stop(self.received)
                wait([result], _SECONDS_BETWEEN_LOOKS)
            result.result()
        finally:
            self._passes_on = False

    def abort(self) -> None:
        """Ends what the main thread does, `run` included, at once; may be called from another thread."""
        self._is_aborted = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _receive(self, number: int, _: FrameType | None) -> None:
        is_first = self.received is None
        self.received = signal.Signals(number).name
        if not (is_first and self._passes_on):
            raise Stopped(f"stopped by {self.received}")

    def __enter__(self) -> Self:
        self._earlier = {number: signal.getsignal(number) for number in _SIGNALS}
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._earlier.items():
                signal.signal(number, handler)


def _in_a_daemon_thread(work: Callable[[], object]) -> Future[object]:
    """A `ThreadPoolExecutor` would keep the process from ending while the work goes on."""
    result: Future[object] = Future()

    def do() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the thread that waits
            result.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return result
