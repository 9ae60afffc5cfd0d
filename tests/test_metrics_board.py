"""Metric lines on their way to file, TensorBoard and tracker: nothing doubled after a restart, nothing in training's way."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_facts import metric_line, worker_group

from pipelines import event_files, metrics_board, metrics_file, stage_watch, storage
from pipelines.event_files import EventFiles
from pipelines.metrics_board import BoardClient, BoardSettings, MetricsBoard, start_board
from pipelines.metrics_file import MetricsFile, read_metrics
from pipelines.stage_watch import StageWatch


def settings_of(folder: Path) -> BoardSettings:
    folder.mkdir(exist_ok=True)
    return BoardSettings("mars", str(folder), has_tensorboard=True, tracker=None)


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a tag, as TensorBoard shows it."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, round(point.value, 4)) for point in events.Scalars(tag)]


class TestBoard:
    """The board itself, in this process."""

    def test_steps_done_again_after_a_restart_replace_those_before(self, tmp_path):
        """Workers are lost after step 5 and go on from the checkpoint after step 3; then the driver is killed after step 6."""
        board = MetricsBoard(settings_of(tmp_path))
        board.restart(worker_group(0, started=1.0))
        for step in range(1, 6):
            board.post(metric_line(step, loss=float(step)))
        board.restart(worker_group(3, started=2.0))
        for step in range(4, 7):
            board.post(metric_line(step, loss=10.0 + step, seconds=2.0 * (step - 3), samples=10 * (step - 3)))
        assert board.close("failed") == []
        board = MetricsBoard(settings_of(tmp_path))
        board.restart(worker_group(5, started=3.0))
        board.post(metric_line(6, loss=106.0, seconds=2.0, samples=10))
        assert board.close("finished") == []
        lines = read_metrics(str(tmp_path / "metrics.jsonl"))
        expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0), (5, 15.0), (6, 106.0)]
        assert [(line["step"], line["loss"]) for line in lines] == expected
        assert curve(tmp_path / "tensorboard", "loss") == expected
        assert [line["seconds"] for line in lines] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
        assert [line["samples"] for line in lines] == [10, 20, 30, 40, 50, 60]
        groups = json.loads((tmp_path / "worker_groups.json").read_text())
        assert [(group["first_step"], group["steps_done_again"]) for group in groups] == [(0, 0), (3, 2), (5, 1)]

    def test_each_number_is_a_tag_and_held_out_losses_are_points_where_they_are(self, tmp_path):
        board = MetricsBoard(settings_of(tmp_path))
        board.restart(worker_group())
        board.post(metric_line(1, grad_norm=None))
        board.post(metric_line(2, held_out_loss=1.5))
        board.close("finished")
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert set(events.Tags()["scalars"]) == set(metric_line(1)) - {"step"}
        assert curve(tmp_path / "tensorboard", "held_out_loss") == [(2, 1.5)]
        assert [step for step, _ in curve(tmp_path / "tensorboard", "grad_norm")] == [2]

    def test_calls_that_ray_repeats_count_once(self, tmp_path):
        board = MetricsBoard(settings_of(tmp_path))
        for _ in range(2):
            board.restart(worker_group())
            board.post(metric_line(1))
        board.close("finished")
        assert len(read_metrics(str(tmp_path / "metrics.jsonl"))) == 1
        assert len(json.loads((tmp_path / "worker_groups.json").read_text())) == 1

    def test_an_outlet_that_fails_is_told_of_once_and_costs_no_line(self, tmp_path):
        (tmp_path / "tensorboard").write_text("a file where the folder should be")
        board = MetricsBoard(settings_of(tmp_path))
        board.restart(worker_group())
        for step in (1, 2, 3):
            board.post(metric_line(step))
        warnings = board.close("finished")
        assert len(warnings) == 1
        assert warnings[0].startswith("TensorBoard: ")
        assert len(read_metrics(str(tmp_path / "metrics.jsonl"))) == 3

    def test_a_question_for_the_newest_step_takes_no_warning_away(self, tmp_path):
        (tmp_path / "tensorboard").write_text("a file where the folder should be")
        board = MetricsBoard(settings_of(tmp_path))
        assert board.last_step() == 0
        board.restart(worker_group())
        board.post(metric_line(1))
        board.close("stopped")
        assert board.last_step() == 1
        assert board.look().warnings[0].startswith("TensorBoard: ")

    def test_an_outlet_that_hangs_holds_nobody_up(self, tmp_path, monkeypatch):
        free = threading.Event()
        monkeypatch.setattr(EventFiles, "write", lambda outlet, line: free.wait(30))
        monkeypatch.setattr(metrics_board, "_CLOSE_SECONDS", 5.0)
        board = MetricsBoard(settings_of(tmp_path))
        started = time.monotonic()
        board.restart(worker_group())
        board.post(metric_line(1))
        board.post(metric_line(2))
        assert [line["step"] for line in board.look().lines] == [1, 2]
        assert "TensorBoard: not finished after" in board.close("finished")[0]
        assert time.monotonic() - started < 25
        assert len(read_metrics(str(tmp_path / "metrics.jsonl"))) == 2
        free.set()


class Bucket:
    """A stand-in for S3 behind `pipelines.storage`: what was published, and how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, bytes] = {}
        self.num_puts = 0
        monkeypatch.setattr(storage, "publish_bytes", self.put)
        monkeypatch.setattr(storage, "publish_file", lambda local, path: self.put(path, Path(local).read_bytes()))
        monkeypatch.setattr(storage, "list_folder", lambda folder: [p for p in self.files if p.startswith(folder)])

    def put(self, path: str, data: bytes) -> None:
        self.files[path] = data
        self.num_puts += 1


def test_half_a_line_that_a_kill_has_left_spoils_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(metric_line(1)) + "\n" + json.dumps(metric_line(2))[:20])
    lines = MetricsFile(str(path), read_metrics(str(path)))
    lines.write(metric_line(2))
    lines.write(metric_line(3))
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 2, 3]


def test_a_file_on_s3_is_sent_whole_now_and_then_and_at_the_end(monkeypatch):
    bucket, now = Bucket(monkeypatch), [100.0]
    monkeypatch.setattr(metrics_file.time, "monotonic", lambda: now[0])
    path = "s3://bucket/run/mars/metrics.jsonl"
    lines = MetricsFile(path, [metric_line(1)])
    for step in (2, 3, 4):
        lines.write(metric_line(step))
    assert bucket.num_puts == 1
    lines.flush()
    assert bucket.num_puts == 1
    now[0] += 3.0
    lines.flush()
    assert [json.loads(text)["step"] for text in bucket.files[path].splitlines()] == [1, 2, 3, 4]
    lines.flush()
    assert bucket.num_puts == 2
    lines.write(metric_line(5))
    lines.close("finished")
    assert bucket.num_puts == 3
    assert len(bucket.files[path].splitlines()) == 5


def test_event_files_on_s3_are_sent_now_and_then_and_at_the_end(monkeypatch, tmp_path):
    bucket, now = Bucket(monkeypatch), [100.0]
    monkeypatch.setattr(event_files.time, "monotonic", lambda: now[0])
    folder = "s3://bucket/run/mars/tensorboard"
    for first, last in ((1, 4), (3, 5)):  # two workers, one after the other
        events = EventFiles(folder)
        events.restart(first - 1, [])
        for step in range(first, last + 1):
            events.write(metric_line(step, loss=first + step / 10))
        puts = bucket.num_puts
        events.write(metric_line(last + 1, loss=0.0))
        assert bucket.num_puts == puts
        now[0] += 60.0
        events.flush()
        assert bucket.num_puts == puts + 1
        events.close("finished")
    assert len(bucket.files) == 2
    for path, content in bucket.files.items():
        (tmp_path / Path(path).name).write_bytes(content)
    assert curve(tmp_path, "loss") == [(1, 1.1), (2, 1.2), (3, 3.3), (4, 3.4), (5, 3.5), (6, 0.0)]


class TestLostActor:
    """The board as an actor that dies."""

    def client(self, board: Any) -> BoardClient:
        client = BoardClient(board)
        facts = {name: value for name, value in worker_group().items() if name not in ("started", "first_step")}
        client.describe(facts)
        client.start(0)
        return client

    def post(self, client: BoardClient, step: int) -> None:
        line = metric_line(step)
        for name in ("seconds", "samples", "response_tokens"):
            del line[name]
        client.post({**line, "num_samples": 4, "num_response_tokens": 40})

    def test_a_board_that_dies_is_started_again_and_goes_on(self, ray_session, tmp_path):
        board = start_board(settings_of(tmp_path))
        client = self.client(board)
        self.post(client, 1)
        client.finish()
        ray.get(board.close.remote("stopped"))  # so that line 1 is in the file for certain
        process = ray.get(board.__ray_call__.remote(lambda board: os.getpid()))
        ray.kill(board, no_restart=False)
        while psutil.pid_exists(process):  # until then it would take further lines
            time.sleep(0.05)
        self.post(client, 2)
        client.finish()
        ray.get(board.close.remote("finished"))
        ray.kill(board)
        lines = read_metrics(str(tmp_path / "metrics.jsonl"))
        assert [(line["step"], line["samples"], line["response_tokens"]) for line in lines] == [(1, 4, 40), (2, 8, 80)]
        assert [step for step, _ in curve(tmp_path / "tensorboard", "loss")] == [1, 2]

    def test_a_board_that_does_not_answer_is_not_waited_for_twice(self, ray_session, tmp_path, monkeypatch):
        monkeypatch.setattr(stage_watch, "_ANSWER_SECONDS", 0.5)
        with StageWatch(settings_of(tmp_path), num_steps=3, pace="", make_page=lambda: None) as watch:
            ray.get(watch.board.look.remote())
            watch.board.__ray_call__.remote(lambda board: time.sleep(60))
            started = time.monotonic()
        assert time.monotonic() - started < 10

    def test_a_board_that_is_gone_stops_neither_workers_nor_the_driver(self, ray_session, tmp_path, caplog):
        caplog.set_level(logging.WARNING)
        pages = []
        with StageWatch(
            settings_of(tmp_path), num_steps=3, pace="3 steps", make_page=lambda: pages.append(time.monotonic())
        ) as watch:
            client = self.client(watch.board)
            self.post(client, 1)
            client.finish()
            ray.kill(watch.board)
            started = time.monotonic()
            for step in (2, 3):
                self.post(client, step)
            client.finish()
            assert watch.refusal() is None
        assert time.monotonic() - started < 20
        assert caplog.text.count("training goes on without it") == 1
        assert caplog.text.count("training goes on unseen") == 1
        assert pages
