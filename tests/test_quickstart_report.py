"""The quickstart's report, from two evaluations made by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from prompt_files import write_parquet

from pipelines.quickstart_report import write_quickstart_report
from pipelines.quickstart_task import parse_prompt, write_quickstart_data
from workers.models.folder import MultiTokenSettings, write_multi_token_settings

NUM_PROMPTS = 8


def setting(
    mode: str, threshold: float | None, window: int | str, right: int, same: int, rate: float
) -> dict[str, Any]:
    """A row of an evaluation: right answers, answers as in one-token decoding, tokens per forward."""
    return {
        "mode": mode,
        "threshold": threshold,
        "window": window,
        "num_rows": NUM_PROMPTS,
        "accuracy": right / NUM_PROMPTS,
        "num_identical": same,
        "tokens_per_forward": rate,
        "tokens_per_second": 1000.0 * rate,
        "forwards_per_window": {"1": 30, "8+branches": 10} if window == "auto" else {str(window): 40},
    }


SETTINGS = {
    "sft": [setting("one_token", None, 1, 8, 8, 1.0), setting("tau", 0.95, 8, 0, 0, 3.5)],
    "mars": [
        setting("one_token", None, 1, 7, 8, 1.0),
        setting("verified", None, 8, 7, 8, 4.5),
        setting("verified", None, "auto", 7, 8, 1.5),
        setting("tau", 0.95, 8, 6, 5, 2.5),
        setting("tau", 1.0, 8, 7, 8, 1.0),
        setting("tau", 0.4, 8, 1, 0, 6.0),
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the training job and both evaluations leave."""
    write_quickstart_data(tmp_path / "train" / "example", 0, num_train_rows=16, num_heldout_rows=NUM_PROMPTS)
    (tmp_path / "train" / "mars" / "model").mkdir(parents=True)
    settings = MultiTokenSettings(mask_token_id=3, block_size=8, prompt_format="chat", objective="mars")
    write_multi_token_settings(settings, tmp_path / "train" / "mars" / "model")
    for stage in SETTINGS:
        (tmp_path / stage).mkdir()
    return tmp_path


def heldout(folder: Path) -> list[list[dict[str, str]]]:
    path = folder / "train" / "example" / "heldout" / "part-00000.parquet"
    return pq.read_table(path)["messages"].to_pylist()  # type: ignore[no-any-return]


def report_of(folder: Path, settings: dict[str, list[dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    for stage, rows in settings.items():
        (folder / stage / "report.json").write_text(json.dumps({"rows": rows}))
    table = write_quickstart_report(str(folder), threshold=0.95, window=8, train_seconds=61.26, generate_seconds=9.0)
    return table, json.loads((folder / "report.json").read_text())


def test_each_figure_is_that_of_its_setting(folder: Path) -> None:
    _, report = report_of(folder, SETTINGS)
    assert report.pop("settings") == SETTINGS
    assert report == {
        "ar_accuracy": 1.0,
        "ar_tau_accuracy": 0.0,
        "mars_one_token_accuracy": 7 / 8,
        "mars_accuracy": 6 / 8,
        "tokens_per_forward": 2.5,
        "threshold": 0.95,
        "verified_identical": True,
        "verified_tokens_per_forward": 4.5,
        "tau_sweep": [
            {"threshold": 1.0, "accuracy": 7 / 8, "tokens_per_forward": 1.0},
            {"threshold": 0.95, "accuracy": 6 / 8, "tokens_per_forward": 2.5},
            {"threshold": 0.4, "accuracy": 1 / 8, "tokens_per_forward": 6.0},
        ],
        "auto": {
            "identical": True,
            "forwards_per_window": {"1": 30, "8+branches": 10},
            "tokens_per_forward": 1.5,
            "tokens_per_second": 1500.0,
            "one_token_tokens_per_second": 1000.0,
        },
        "block_size": 8,
        "num_prompts": NUM_PROMPTS,
        "heldout_pairs_in_training": 0,
        "train_seconds": 61.3,
        "generate_seconds": 9.0,
    }


def test_one_other_answer_is_not_identical(folder: Path) -> None:
    for place, expected in ((1, (False, True)), (2, (True, False))):
        rows = [row | ({"num_identical": 7} if row is SETTINGS["mars"][place] else {}) for row in SETTINGS["mars"]]
        _, report = report_of(folder, SETTINGS | {"mars": rows})
        assert (report["verified_identical"], report["auto"]["identical"]) == expected


def test_the_table_has_one_line_per_setting(folder: Path) -> None:
    table, _ = report_of(folder, SETTINGS)
    lines = [line.split() for line in table.splitlines()]
    assert lines[2] == ["AR", "SFT", "one_token", "-", "1", "1.000", "8", "1.000", "1000.0"]
    assert lines[6] == ["MARS", "verified", "-", "auto", "0.875", "8", "1.500", "1500.0"]
    assert "1: 75%, 8+branches: 25%" in table
    assert str(folder / "report.json") in table


def test_a_held_out_pair_in_the_training_shards_is_counted_in_either_order(folder: Path) -> None:
    """The figure comes from the files: data that leaks must not be reported as clean."""
    problem = parse_prompt(heldout(folder)[0][0]["content"])
    swapped = f"Eva packs {problem.second} maps and {problem.first} more. How many?"
    leak = [[{"role": "user", "content": swapped}, {"role": "assistant", "content": "?"}]]
    write_parquet(folder / "train" / "example" / "train" / "part-99999.parquet", {"messages": leak})
    assert report_of(folder, SETTINGS)[1]["heldout_pairs_in_training"] == 1
