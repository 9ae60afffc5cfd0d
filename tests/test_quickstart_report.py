"""The quickstart's report, from four output folders made by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from prompt_files import write_parquet

from pipelines.quickstart_report import DecodedSet, write_quickstart_report
from pipelines.quickstart_task import parse_prompt, write_quickstart_data
from workers.models.folder import MultiTokenSettings, write_multi_token_settings

NUM_PROMPTS = 8
# Right answers, wrong answers, rows without an answer; tokens per forward.
SETS = {
    ("sft", "one_token"): (8, 0, 0, 1.0),
    ("sft", "tau"): (0, 8, 0, 3.5),
    ("mars", "one_token"): (7, 1, 0, 1.0),
    ("mars", "tau"): (6, 0, 2, 2.5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the training job leaves, and the four outputs of the generate jobs in the order of `SETS`."""
    write_quickstart_data(tmp_path / "train" / "example", 0, num_train_rows=16, num_heldout_rows=NUM_PROMPTS)
    (tmp_path / "train" / "mars" / "model").mkdir(parents=True)
    settings = MultiTokenSettings(mask_token_id=3, block_size=8, prompt_format="chat", objective="mars")
    write_multi_token_settings(settings, tmp_path / "train" / "mars" / "model")
    return tmp_path


def heldout(folder: Path) -> list[list[dict[str, str]]]:
    path = folder / "train" / "example" / "heldout" / "part-00000.parquet"
    return pq.read_table(path)["messages"].to_pylist()  # type: ignore[no-any-return]


def write_output(folder: Path, stage: str, mode: str) -> DecodedSet:
    num_right, num_wrong, num_errors, tokens_per_forward = SETS[stage, mode]
    output = folder / f"{stage}_{mode}"
    prompts = heldout(folder)[: num_right + num_wrong]
    answers = [parse_prompt(messages[0]["content"]).answer("aaabb") for messages in prompts]
    texts = answers[:num_right] + [answer.replace("Total", "Sum") for answer in answers[num_right:]]
    middle = len(texts) // 2
    write_parquet(output / "part-0.parquet", {"text": texts[:middle], "messages": prompts[:middle]})
    write_parquet(output / "part-1.parquet", {"text": texts[middle:], "messages": prompts[middle:]})
    write_parquet(output / "_errors" / "part-0.parquet", {"error_code": ["prompt_too_long"] * num_errors})
    job = {
        "num_rows": NUM_PROMPTS,
        "num_errors": num_errors,
        "tokens_per_forward": tokens_per_forward,
        "query_tokens_per_token": 4.0,
        "tokens_per_second": 1000.0,
        "other": "figures",
    }
    (output / "_report.json").write_text(json.dumps(job))
    return DecodedSet(stage, mode, str(output))


def report_of(folder: Path) -> tuple[str, dict[str, Any]]:
    decoded = [write_output(folder, stage, mode) for stage, mode in SETS]
    table = write_quickstart_report(str(folder), decoded, threshold=0.95, train_seconds=61.26, generate_seconds=9.0)
    return table, json.loads((folder / "report.json").read_text())


def test_a_row_without_an_answer_is_wrong_and_each_figure_is_that_of_its_set(folder: Path) -> None:
    _, report = report_of(folder)
    settings = report.pop("settings")
    assert report == {
        "ar_accuracy": 1.0,
        "ar_tau_accuracy": 0.0,
        "mars_one_token_accuracy": 7 / 8,
        "mars_accuracy": 6 / 8,
        "tokens_per_forward": 2.5,
        "threshold": 0.95,
        "block_size": 8,
        "num_prompts": NUM_PROMPTS,
        "heldout_pairs_in_training": 0,
        "train_seconds": 61.3,
        "generate_seconds": 9.0,
    }
    assert list(settings) == [f"{stage}_{mode}" for stage, mode in SETS]
    assert settings["mars_tau"] == {
        "accuracy": 6 / 8,
        "verdicts": {"ok": 6},
        "num_rows": NUM_PROMPTS,
        "num_errors": 2,
        "tokens_per_forward": 2.5,
        "query_tokens_per_token": 4.0,
        "tokens_per_second": 1000.0,
    }
    assert settings["mars_one_token"]["verdicts"] == {"ok": 7, "total": 1}


def test_the_table_has_one_line_per_set(folder: Path) -> None:
    table, _ = report_of(folder)
    lines = [line.split() for line in table.splitlines()]
    assert lines[2:6] == [
        ["AR", "SFT", "one", "token", "-", "1.000", "1.000", "1000.0"],
        ["AR", "SFT", "several", "0.950", "0.000", "3.500", "1000.0"],
        ["MARS", "one", "token", "-", "0.875", "1.000", "1000.0"],
        ["MARS", "several", "0.950", "0.750", "2.500", "1000.0"],
    ]
    assert str(folder / "report.json") in table


def test_a_held_out_pair_in_the_training_shards_is_counted_in_either_order(folder: Path) -> None:
    """The figure comes from the files: data that leaks must not be reported as clean."""
    problem = parse_prompt(heldout(folder)[0][0]["content"])
    swapped = f"Eva packs {problem.second} maps and {problem.first} more. How many?"
    leak = [[{"role": "user", "content": swapped}, {"role": "assistant", "content": "?"}]]
    write_parquet(folder / "train" / "example" / "train" / "part-99999.parquet", {"messages": leak})
    assert report_of(folder)[1]["heldout_pairs_in_training"] == 1
