"""Metric lines and page facts as a training run leaves them, for the tests of what is shown of it."""

from typing import Any

from pipelines.html_report import StageFacts, TrainingFacts


def metric_line(step: int, **changes: Any) -> dict[str, Any]:
    """One line of `metrics.jsonl`: the loss falls, ten samples a step, two seconds a step."""
    return {
        "step": step,
        "loss": 2.0 + 8.0 / step,
        "ar_loss": 1.0 + 4.0 / step,
        "mask_loss": 1.0 + 4.0 / step,
        "grad_norm": 1.0 + 1.0 / step,
        "learning_rate": 1e-4 / step,
        "response_tokens_per_second": 1000.0 + step % 7,
        "padding_share": 0.1,
        "data_wait_share": 0.02,
        "data_wait_seconds": 0.04,
        "peak_memory_mb": 512.0,
        "held_out_loss": None,
        "seconds": 2.0 * step,
        "samples": 10 * step,
        "response_tokens": 100 * step,
    } | changes


def worker_group(first_step: int = 0, **changes: Any) -> dict[str, Any]:
    """The facts of one group of workers."""
    return {
        "started": 1.75e9 + first_step,
        "time": "2026-11-30 03:12:45 UTC",
        "first_step": first_step,
        "steps_done_again": 0,
        "parameters": 1234567,
        "trainable_parameters": 1234567,
        "ranks": 8,
        "device": "NVIDIA H200",
        "host": "node-3",
    } | changes


def training_facts(**changes: Any) -> TrainingFacts:
    """A run in its second stage, with held-out losses, a restart, rejected rows and a mixture."""
    sft = [metric_line(step, mask_loss=0.0) for step in range(1, 21)]
    held_out = {150: 2.4, 300: 2.1, 450: 2.2}
    mars = [metric_line(step, held_out_loss=held_out.get(step)) for step in range(10, 461, 10)]
    values: dict[str, Any] = {
        "model": "/models/small-sft",
        "output": "/shared/runs/mine",
        "state": "running",
        "reason": "",
        "exit_code": None,
        "started": "2026-11-29 22:00:01 UTC",
        "updated": "2026-11-30 03:20:00 UTC on head",
        "seconds": 19200.0,
        "data": {
            "samples": 9500,
            "rejected": 500,
            "reasons": {"null content": 400, "no assistant turn": 100},
            "sources": [
                {"path": "a.parquet", "rows": 9000, "weight": 0.5},
                {"path": "b.jsonl", "rows": 500, "weight": 2.0},
            ],
        },
        "stages": [
            StageFacts("sft", 20, 0.2, sft, [worker_group()], True),
            StageFacts("mars", 600, 6.0, mars, [worker_group(), worker_group(300, steps_done_again=40)], False),
        ],
        "changed_settings": [("training.learning_rate", "1e-4", "5e-06")],
        "recipe": "model:\n  path: /models/small-sft\n",
        "environment": {"ray": "2.60.0", "gpus": ["H200"], "peft": None},
    }
    return TrainingFacts(**values | changes)
