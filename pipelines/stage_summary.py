"""What a training stage came to, from its metric lines: for the report, the table and the page."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.metrics_file import Line
from pipelines.sample_order import StreamPlan


def summarize_stage(lines: Sequence[Line], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """First and last losses, held-out losses, speed, and restarts; None where the lines do not tell.

    Args:
        lines: the metric lines, in order.
        groups: facts of each group of workers that was started.
    """
    speeds = [line["response_tokens_per_second"] for line in lines]
    return {
        "first_loss": lines[0]["loss"] if lines else None,
        "final_loss": lines[-1]["loss"] if lines else None,
        "held_out": _held_out(lines),
        "response_tokens": lines[-1]["response_tokens"] if lines else None,
        "response_tokens_per_second": round(statistics.median(speeds), 1) if speeds else None,
        "peak_memory_mb": max((line["peak_memory_mb"] for line in lines), default=None),
        "restarts": max(0, len(groups) - 1),
        "steps_done_again": sum(group["steps_done_again"] for group in groups),
    }


def _held_out(lines: Sequence[Line]) -> dict[str, Any] | None:
    evaluated = [line for line in lines if line.get("held_out_loss") is not None]
    if not evaluated:
        return None
    best = min(evaluated, key=lambda line: line["held_out_loss"])
    return {
        "first_loss": evaluated[0]["held_out_loss"],
        "final_loss": evaluated[-1]["held_out_loss"],
        "best_loss": best["held_out_loss"],
        "best_step": best["step"],
    }


def describe_pace(plan: StreamPlan, num_ranks: int) -> str:
    """What a stage goes through, in words."""
    num_tokens = sum(part.num_tokens for part in plan.index.parts)
    num_response_tokens = sum(part.num_response_tokens for part in plan.index.parts)
    return (
        f"{num_tokens:,} tokens per epoch, {num_response_tokens:,} of them in responses; {plan.num_steps:,} steps "
        f"({plan.epochs:.2f} epochs) on {num_ranks} ranks"
    )


def seconds_left(lines: Sequence[Line], num_steps: int) -> float | None:
    """How long the rest takes at the pace of these lines, evaluations and checkpoints included; None before there is a pace."""
    if len(lines) < 2:
        return None
    first, last = lines[0], lines[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]) * (num_steps - last["step"])


def duration(seconds: float) -> str:
    """Seconds as people say them: `42s`, `3m05s`, `2h07m`, `3d04h`."""
    whole = round(seconds)
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // smaller:02d}{smaller_name}"
    return f"{whole}s"
