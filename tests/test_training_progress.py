"""What the console and the table say of a training run."""

import logging

import pytest
from training_facts import metric_line, worker_group

from pipelines.metrics_board import BoardView
from pipelines.progress import Progress
from pipelines.reports import environment, training_table
from pipelines.stage_summary import duration, seconds_left, summarize_stage
from pipelines.stage_watch import StageConsole


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (3600, "1h00m"), (7650, "2h07m"), (273600, "3d04h")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_the_time_left_is_that_of_recent_steps():
    lines = [metric_line(step, seconds=10.0 * step) for step in (100, 110, 120)]
    assert seconds_left(lines, 200) == pytest.approx(800.0)
    assert seconds_left(lines[:1], 200) is None


def test_log_lines_of_a_stage(caplog, monkeypatch):
    """The facts first, a held-out loss once, a restart by name, warnings of the board as they come."""
    monkeypatch.setattr("pipelines.progress._SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level(logging.INFO)
    console = StageConsole("mars", 100, "5,000 tokens per epoch, 100 steps (2.00 epochs) on 8 ranks")
    first = worker_group(trainable_parameters=4567)
    lines = [metric_line(10, held_out_loss=2.5), metric_line(20)]
    again = worker_group(10, steps_done_again=10)
    with Progress("mars", 100, "steps") as progress:
        console.show(BoardView(), progress)
        console.show(BoardView(group=first), progress)
        console.show(BoardView(lines[:1], first), progress)
        console.show(BoardView(lines, first, ["mlflow: no answer"]), progress)
        console.show(BoardView(lines, first), progress)
        console.show(BoardView(lines[:1], again), progress)
        console.show(BoardView([lines[0], metric_line(20, loss=7.0)], again), progress)
    assert [record.getMessage() for record in caplog.records] == [
        "mars: training 4,567 of 1,234,567 parameters on NVIDIA H200; "
        "5,000 tokens per epoch, 100 steps (2.00 epochs) on 8 ranks",
        "mars: 10/100 steps  loss 2.8000  lr 1.00e-05  1003 response tokens/s  data wait 2.0%  held-out loss 2.5000 (step 10)",
        "mars: mlflow: no answer",
        "mars: 20/100 steps  loss 2.4000  lr 5.00e-06  1006 response tokens/s  data wait 2.0%  2m40s left",
        "mars: going on after step 10; at least 10 steps are done again",
        "mars: 20/100 steps  loss 7.0000  lr 5.00e-06  1006 response tokens/s  data wait 2.0%  2m40s left",
    ]


def test_a_resumed_stage_shows_nothing_of_the_run_before(caplog):
    caplog.set_level(logging.INFO)
    before, now = worker_group(), worker_group(10)
    console = StageConsole("mars", 100, "on 8 ranks", [before["started"]])
    with Progress("mars", 100, "steps") as progress:
        console.show(BoardView([metric_line(10), metric_line(20)], before), progress)
        assert not caplog.records
        console.show(BoardView([metric_line(10)], now), progress)
    assert [record.getMessage() for record in caplog.records] == [
        "mars: training 1,234,567 of 1,234,567 parameters on NVIDIA H200; on 8 ranks",
        "mars: going on after step 10",
    ]


def test_a_stage_in_figures():
    lines = [
        metric_line(1, held_out_loss=3.0),
        metric_line(2, held_out_loss=1.0, peak_memory_mb=700.0),
        metric_line(3, held_out_loss=2.0),
    ]
    groups = [worker_group(), worker_group(1, steps_done_again=4)]
    assert summarize_stage(lines, groups) == {
        "first_loss": 10.0,
        "final_loss": pytest.approx(2 + 8 / 3),
        "held_out": {"first_loss": 3.0, "final_loss": 2.0, "best_loss": 1.0, "best_step": 2},
        "response_tokens": 300,
        "response_tokens_per_second": 1002.0,
        "peak_memory_mb": 700.0,
        "restarts": 1,
        "steps_done_again": 4,
    }
    assert set(summarize_stage([], []).values()) == {None, 0}


def test_the_table_has_held_out_columns_when_there_are_held_out_losses():
    lines = [metric_line(1, held_out_loss=3.0), metric_line(2, held_out_loss=1.0)]
    stages = {
        name: summarize_stage(stage_lines, [worker_group()]) | {"steps": 2, "epochs": 0.5, "seconds": 9.0}
        for name, stage_lines in (("sft", [metric_line(1)]), ("mars", lines))
    }
    report = {"stages": stages, "data": {"samples": 40, "rejected": 1}, "model": "m", "page": "runs/a/report.html"}
    assert training_table(report) == (
        "stage  steps  epochs  first loss  final loss  seconds  tokens/s  held-out first   best  final\n"
        "-----  -----  ------  ----------  ----------  -------  --------  --------------  -----  -----\n"
        "sft        2   0.500      10.000      10.000    9.000    1001.0               -      -      -\n"
        "mars       2   0.500      10.000       6.000    9.000    1001.5           3.000  1.000  1.000\n"
        "\n"
        "samples        40\n"
        "rejected rows  1\n"
        "model          m\n"
        "page           runs/a/report.html\n"
    )
    del stages["mars"]
    assert "held-out" not in training_table(report)


def test_the_environment_names_versions_and_machine():
    found = environment()
    assert found["marsray"] == "0.1.0"
    assert {"ray", "torch", "deepspeed", "peft", "python", "cpu", "cpus", "gpus", "nodes"} <= found.keys()
