"""One job at a time on a run folder: a lock that dies with its holder, on a file system and on S3.

The lock is a small file beside the run folder, `RUN.lock/NUMBER.json`, that its holder writes again every few seconds. A job that
finds one watches it: while it changes its holder lives, and the job is refused; when it stays the same the holder is dead, and the
job makes the file with the next number, which only one of several can. No clock is compared with that of another machine.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipelines import storage
from workers.errors import InputError

BEAT_SECONDS = 10.0
PATIENCE_SECONDS = 40.0  # how long a lock stays the same before its holder counts as dead
_LOOK_SECONDS = 1.0
_logger = logging.getLogger(__name__)


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class RunLock:
    """The lock of one run folder, held while it is entered. A holder that loses it, say by a suspended machine, is told.

    Args:
        run_folder: local path or `s3://` URI.
        on_lost: called, in a thread, when another job has taken the folder; this one must write nothing more.

    Raises:
        InputError: another job holds it; says who.
    """

    def __init__(self, run_folder: str, on_lost: Callable[[], None] = _end_this_process) -> None:
        self._on_lost = on_lost
        self._run_folder, self._folder = run_folder, f"{run_folder.rstrip('/')}.lock"
        self._record: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": _process(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "token": uuid.uuid4().hex,
            "beat": 0,
        }
        self._number = 0
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_released, daemon=True)

    def __enter__(self) -> Self:
        stale = self._numbers()
        if stale:
            self._require_dead(stale[-1])
        self._number = stale[-1] + 1 if stale else 1
        is_taken = storage.publish_new(self._path(self._number), self._content())
        if not is_taken or set(self._numbers()) - {*stale, self._number}:
            if is_taken:
                storage.delete(self._path(self._number))
            raise self._refusal("another job has taken at the same moment")
        for number in stale:
            storage.delete(self._path(number))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._thread.join()
        with suppress(InputError, OSError):  # one that stays is taken over; a folder that stays has another job in it
            storage.delete(self._path(self._number))
            if not storage.is_s3(self._folder):
                Path(self._folder).rmdir()

    def _require_dead(self, number: int) -> None:
        """Watches a lock as long as it takes to know that its holder is dead.

        Raises:
            InputError: it lives, or has just ended.
        """
        found = self._read(number)
        if found is None:
            raise self._refusal("another job has only just left")
        holder = json.loads(found)
        name = f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
        is_alive = _is_alive(holder["process"])
        if is_alive is False:
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        if is_alive is None:
            _logger.info("%s held %s; a sign of life from it?", name, self._run_folder)
        while not is_alive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            is_alive = self._read(number) != found
        if is_alive:
            raise self._refusal(f"{name} is writing to")

    def _refusal(self, what: str) -> InputError:
        return InputError(
            "run.output",
            f"{self._run_folder}, which {what}",
            "a run folder that no other job uses",
            "Wait for that job or stop it, or choose another run.output.",
        )

    def _beat_until_released(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            try:
                is_lost = self._numbers()[-1:] > [self._number]
                if not is_lost:
                    self._record["beat"] += 1
                    storage.publish_bytes(self._path(self._number), self._content())
            except (InputError, OSError) as error:
                _logger.warning("the lock of %s could not be renewed: %s", self._run_folder, error)
                continue
            if is_lost:
                _logger.error("another job has taken %s while this one did not answer; ending", self._run_folder)
                self._on_lost()
                return

    def _numbers(self) -> list[int]:
        return sorted(int(Path(info.path).stem) for info in storage.list_folder(self._folder))

    def _read(self, number: int) -> bytes | None:
        path = self._path(number)
        return (storage.read_bytes(path) if storage.find_file(path) is not None else None) or None

    def _path(self, number: int) -> str:
        return storage.join(self._folder, f"{number:06d}.json")

    def _content(self) -> bytes:
        return json.dumps(self._record).encode()


def _process(pid: int) -> list[str] | None:
    """What tells a process from all others: boot, namespace of process ids, id, start time. None when it does not run.

    The host name would not do: containers on one machine may share it and yet not see each other's processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, start_time = fields[0], fields[19]
    return None if state == "Z" else [boot, os.readlink("/proc/self/ns/pid"), str(pid), start_time]


def _is_alive(process: list[str]) -> bool | None:
    """Whether a process runs; None when it cannot be seen from here."""
    mine = _process(os.getpid())
    assert mine is not None
    if process[:2] != mine[:2]:
        return None
    return _process(int(process[2])) == process
