"""The quickstart's table and `report.json`, from what its jobs have left on disk."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.evaluation import accuracy, score, validate_quickstart
from pipelines.paths import resolve
from pipelines.quickstart_task import parse_prompt
from pipelines.reports import facts_table, publish_report, text_table
from workers.config import PromptSettings
from workers.models.folder import read_multi_token_settings

_STAGE_NAMES = {"sft": "AR SFT", "mars": "MARS"}
_MODE_NAMES = {"one_token": "one token", "tau": "several"}
_JOB_FIGURES = ("num_rows", "num_errors", "tokens_per_forward", "query_tokens_per_token", "tokens_per_second")


@dataclass(frozen=True)
class DecodedSet:
    """The answers of one stage's model in one decoding mode: the output folder of a generate job."""

    stage: str
    mode: str
    output: str


def write_quickstart_report(
    folder: str, decoded: list[DecodedSet], *, threshold: float, train_seconds: float, generate_seconds: float
) -> str:
    """Scores the answers, publishes `folder/report.json` and returns the table.

    Args:
        decoded: both stages in both modes.
        train_seconds, generate_seconds: wall time of the training job and of all generate jobs.
    """
    figures = {(each.stage, each.mode): _figures(resolve(each.output)) for each in decoded}
    one_token, tau = figures["mars", "one_token"], figures["mars", "tau"]
    settings = read_multi_token_settings(resolve(f"{folder}/train/mars/model"))
    assert settings is not None
    report = {
        "ar_accuracy": figures["sft", "one_token"]["accuracy"],
        "ar_tau_accuracy": figures["sft", "tau"]["accuracy"],
        "mars_one_token_accuracy": one_token["accuracy"],
        "mars_accuracy": tau["accuracy"],
        "tokens_per_forward": tau["tokens_per_forward"],
        "threshold": threshold,
        "block_size": settings.block_size,
        "num_prompts": tau["num_rows"],
        "heldout_pairs_in_training": _num_shared_pairs(Path(resolve(f"{folder}/train/example"))),
        "train_seconds": round(train_seconds, 1),
        "generate_seconds": round(generate_seconds, 1),
        "settings": {f"{stage}_{mode}": values for (stage, mode), values in figures.items()},
    }
    publish_report(resolve(f"{folder}/report.json"), report)
    rows = [
        [
            _STAGE_NAMES[stage],
            _MODE_NAMES[mode],
            threshold if mode == "tau" else None,
            values["accuracy"],
            values["tokens_per_forward"],
            values["tokens_per_second"],
        ]
        for (stage, mode), values in figures.items()
    ]
    headers = ("model", "tokens per forward", "tau", "accuracy", "tokens/forward", "tokens/s")
    facts = {
        "held-out prompts": report["num_prompts"],
        "of these with an operand pair seen in training": report["heldout_pairs_in_training"],
        "training, seconds": report["train_seconds"],
        "generation, seconds": report["generate_seconds"],
        "report": resolve(f"{folder}/report.json"),
    }
    return text_table(headers, rows) + "\n" + facts_table(facts)


def _figures(output: str) -> dict[str, Any]:
    job = json.loads((Path(output) / "_report.json").read_text())
    verdicts = score(output, PromptSettings(passthrough=("messages",)), validate_quickstart)
    return {
        "accuracy": accuracy(verdicts, job["num_errors"]),
        "verdicts": dict(verdicts),
        **{name: job[name] for name in _JOB_FIGURES},
    }


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
