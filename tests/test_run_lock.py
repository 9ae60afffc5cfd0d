"""Two jobs never write to one run folder, and a dead one keeps no other from it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines import run_lock
from pipelines.run_lock import RunLock
from workers.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
HOLDER = """
import sys, time
from pipelines.run_lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def other_machine(folder: str, number: int = 3) -> Path:
    """A lock as a job on another machine leaves it; its clock is years ahead."""
    path = Path(f"{folder}.lock") / f"{number:06d}.json"
    path.parent.mkdir()
    record = {"host": "node-7", "pid": 12, "process": ["boot", "pid:[1]", "12", "34"], "since": "2099-01-01", "beat": 5}
    path.write_text(json.dumps(record))
    return path


def test_a_second_job_is_refused_while_the_first_lives_and_not_afterwards(folder: str) -> None:
    with RunLock(folder), pytest.raises(InputError, match=rf"run\.output.*process {os.getpid()} on .* \(since 20"):
        RunLock(folder).__enter__()
    with RunLock(folder):
        assert Path(f"{folder}.lock").is_dir()
    assert not Path(f"{folder}.lock").exists()


def test_a_killed_holder_on_this_machine_stops_nobody(folder: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"process {holder.pid}"):
        RunLock(folder).__enter__()
    holder.kill()  # it cannot clean up; not yet waited for, it is a zombie with the same process id
    time.sleep(0.5)
    started = time.monotonic()
    with RunLock(folder):
        assert time.monotonic() - started < 5
    holder.wait()


def test_a_lock_of_another_machine_is_judged_by_its_beat_and_not_by_any_clock(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.05)
    path = other_machine(folder)
    beat = threading.Timer(0.3, lambda: path.write_text(path.read_text().replace('"beat": 5', '"beat": 6')))
    beat.start()
    with pytest.raises(InputError, match="process 12 on node-7"):
        RunLock(folder).__enter__()
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 0.5)
    with RunLock(folder):
        assert [file.name for file in path.parent.iterdir()] == ["000004.json"]


def test_of_many_that_find_a_dead_lock_one_gets_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 0.3)
    other_machine(folder)
    start, ended = threading.Barrier(8), threading.Event()

    def contend(_: int) -> bool:
        start.wait()
        try:
            with RunLock(folder):
                ended.wait(3)
        except InputError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        results = pool.map(contend, range(8))
        time.sleep(1.5)
        ended.set()
        assert sum(results) == 1


def test_a_holder_that_has_lost_its_lock_ends(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    received: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with RunLock(folder):
            (Path(f"{folder}.lock") / "000002.json").write_text("{}")
            deadline = time.monotonic() + 5
            while not received and time.monotonic() < deadline:
                time.sleep(0.02)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert received == [signal.SIGTERM]
