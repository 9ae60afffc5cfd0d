"""The quickstart's table and `report.json`, from what its jobs have left on disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.paths import resolve
from pipelines.quickstart_task import parse_prompt
from pipelines.reports import facts_table, publish_report, text_table
from workers.models.folder import read_multi_token_settings

_STAGE_NAMES = {"sft": "AR SFT", "mars": "MARS"}
_COLUMNS = {
    "mode": "mode",
    "threshold": "tau",
    "window": "window",
    "accuracy": "accuracy",
    "num_identical": "as one token",
    "tokens_per_forward": "tokens/forward",
    "tokens_per_second": "tokens/s",
}


def write_quickstart_report(
    folder: str, *, threshold: float, window: int, train_seconds: float, generate_seconds: float
) -> str:
    """Publishes `folder/report.json` and returns the table.

    Args:
        folder: with `train`, and the evaluations `sft` and `mars`.
        threshold: tau of the figures that the report begins with.
        window: W of all settings but the automatic one.
        train_seconds, generate_seconds: wall time of the training job and of both evaluations.
    """
    rows = {
        stage: json.loads(Path(resolve(f"{folder}/{stage}/report.json")).read_text())["rows"] for stage in _STAGE_NAMES
    }
    ar_one_token, ar_tau = _find(rows["sft"], "one_token"), _find(rows["sft"], "tau", threshold)
    one_token, tau = _find(rows["mars"], "one_token"), _find(rows["mars"], "tau", threshold)
    verified, automatic = (_find(rows["mars"], "verified", window=each) for each in (window, "auto"))
    settings = read_multi_token_settings(resolve(f"{folder}/train/mars/model"))
    assert settings is not None
    num_prompts = one_token["num_rows"]
    report = {
        "ar_accuracy": ar_one_token["accuracy"],
        "ar_tau_accuracy": ar_tau["accuracy"],
        "mars_one_token_accuracy": one_token["accuracy"],
        "mars_accuracy": tau["accuracy"],
        "tokens_per_forward": tau["tokens_per_forward"],
        "threshold": threshold,
        "verified_identical": verified["num_identical"] == num_prompts,
        "verified_tokens_per_forward": verified["tokens_per_forward"],
        "tau_sweep": [
            {name: row[name] for name in ("threshold", "accuracy", "tokens_per_forward")}
            for row in sorted(rows["mars"], key=lambda row: -(row["threshold"] or 0))
            if row["mode"] == "tau"
        ],
        "auto": {
            "identical": automatic["num_identical"] == num_prompts,
            "forwards_per_window": automatic["forwards_per_window"],
            "tokens_per_forward": automatic["tokens_per_forward"],
            "tokens_per_second": automatic["tokens_per_second"],
            "one_token_tokens_per_second": one_token["tokens_per_second"],
        },
        "block_size": settings.block_size,
        "num_prompts": num_prompts,
        "heldout_pairs_in_training": _num_shared_pairs(Path(resolve(f"{folder}/train/example"))),
        "train_seconds": round(train_seconds, 1),
        "generate_seconds": round(generate_seconds, 1),
        "settings": rows,
    }
    path = resolve(f"{folder}/report.json")
    publish_report(path, report)
    return _table(rows, report | {"path": path})


def _table(rows: Mapping[str, list[dict[str, Any]]], report: Mapping[str, Any]) -> str:
    """What people read at the end: a line for each setting, and the facts below."""
    lines = [
        [name, *(row[column] for column in _COLUMNS)] for stage, name in _STAGE_NAMES.items() for row in rows[stage]
    ]
    facts = {
        "held-out prompts": report["num_prompts"],
        "of these with an operand pair seen in training": report["heldout_pairs_in_training"],
        "forwards by automatic window": _shares(report["auto"]["forwards_per_window"]),
        "training, seconds": report["train_seconds"],
        "decoding, seconds": report["generate_seconds"],
        "report": report["path"],
    }
    return text_table(("model", *_COLUMNS.values()), lines) + "\n" + facts_table(facts)


def _find(
    rows: list[dict[str, Any]], mode: str, threshold: float | None = None, window: int | str | None = None
) -> dict[str, Any]:
    """The row of a setting."""
    return next(
        row for row in rows if row["mode"] == mode and row["threshold"] == threshold and window in (None, row["window"])
    )


def _shares(forwards_per_window: dict[str, int]) -> str:
    """For people: which windows had which share of the forwards, the commonest first."""
    total = max(1, sum(forwards_per_window.values()))
    ranked = sorted(forwards_per_window.items(), key=lambda item: -item[1])
    return ", ".join(f"{window}: {count / total:.0%}" for window, count in ranked)


def _num_shared_pairs(example: Path) -> int:
    """Held-out prompts whose operand pair, in either order, occurs in the training shards; counted in the files themselves."""
    train, heldout = (
        [parse_prompt(messages[0]["content"]).pair for messages in _messages(example / part)]
        for part in ("train", "heldout")
    )
    seen = set(train)
    return sum(pair in seen for pair in heldout)


def _messages(folder: Path) -> list[list[dict[str, str]]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path)["messages"].to_pylist()]
