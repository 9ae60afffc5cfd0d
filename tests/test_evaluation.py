"""Evaluation: a grid of settings on one pool, scored by the quickstart's validator; and how its tables look."""

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from prompt_files import BLOCK_SIZE, make_model_folder, write_jsonl, write_parquet
from pydantic import ValidationError

from pipelines import evaluation
from pipelines.answer_scores import accuracy, score, validate_quickstart
from pipelines.evaluation import run_evaluation, settings_grid
from pipelines.quickstart_task import generate_problems, write_quickstart_data
from pipelines.reports import facts_table, text_table
from workers.config import ActorSettings, EvaluateRecipe, EvaluationDecodingSettings, GenerateRecipe, PromptSettings
from workers.errors import InputError


def test_the_grid_is_one_token_and_every_threshold_at_every_window() -> None:
    base = GenerateRecipe(output="/out")
    grid = settings_grid(base, (0.9, 0.5), (2, 4))
    assert list(grid) == ["one_token", *(f"tau_{t}_window_{w}" for w in (2, 4) for t in (0.9, 0.5))]
    assert {name: each.output for name, each in grid.items()} == {name: f"/out/{name}" for name in grid}
    assert (grid["tau_0.5_window_4"].decoding.threshold, grid["tau_0.5_window_4"].decoding.window) == (0.5, 4)
    assert list(settings_grid(base, (1.0,), ())) == ["one_token", "tau_1"]


def test_close_thresholds_have_folders_of_their_own() -> None:
    close = (0.9999999, 0.9999998, 1.0, 1e-7)
    grid = settings_grid(GenerateRecipe(output="/out"), close, ())
    assert list(grid)[1:] == ["tau_0.9999999", "tau_0.9999998", "tau_1", "tau_1e-07"]
    assert [grid[name].decoding.threshold for name in list(grid)[1:]] == list(close)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"windows": (0,)}, ("windows", 0)),
        ({"windows": (4, 100)}, ("windows", 1)),
        ({"thresholds": (-3.0,)}, ("thresholds", 0)),
        ({"decoding": {"threshold": 0.5}}, ("decoding", "threshold")),
        ({"decoding": {"mode": "tau"}}, ("decoding", "mode")),
        ({"decoding": {"window": 4}}, ("decoding", "window")),
    ],
)
def test_a_grid_that_cannot_be_evaluated_is_refused_by_name(changes: dict[str, Any], field: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError) as refused:
        EvaluateRecipe(**changes)
    assert [error["loc"] for error in refused.value.errors()] == [field]


def test_an_ordinary_model_has_no_tau_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "Hi"}])
    recipe = EvaluateRecipe(
        model=make_model_folder(tmp_path / "model"),
        prompts=PromptSettings(paths=(str(tmp_path / "in.jsonl"),)),
        output=str(tmp_path / "out"),
        thresholds=(0.9, 1.0),  # 1.0 keeps no draft, whatever its window
        windows=(BLOCK_SIZE, BLOCK_SIZE + 2),
    )
    assert run_evaluation(recipe, dry_run=True) is None
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["window 6 is larger than 4, the block size that the model was trained with"]
    (tmp_path / "model" / "marsray.json").unlink()
    with pytest.raises(InputError, match=r"^thresholds: .*marsray\.json.* expected \[\]"):
        run_evaluation(recipe, dry_run=True)
    assert run_evaluation(recipe.model_copy(update={"thresholds": ()}), dry_run=True) is None
    assert not (tmp_path / "out").exists()


def test_a_row_without_an_answer_is_a_wrong_one() -> None:
    assert accuracy({"ok": 3, "total": 1}, 4) == 3 / 8
    assert accuracy({"total": 1}, 0) == 0.0
    assert accuracy({}, 4) is None


def test_answers_are_scored_by_the_validator_whatever_the_column(tmp_path: Path) -> None:
    problems = list(generate_problems(0, 4, 0.5, excluded=frozenset()))
    texts = [problem.answer("aaabb") for problem in problems]
    texts[1] = texts[1].replace("Total", "total")
    prompts = [problem.prompt() for problem in problems]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    write_parquet(tmp_path / "a" / "part-0.parquet", {"text": texts, "question": prompts})
    write_parquet(tmp_path / "a" / "_errors" / "part-0.parquet", {"error_code": ["x"]})
    write_parquet(tmp_path / "b" / "part-0.parquet", {"text": texts, "messages": messages})
    write_parquet(tmp_path / "c" / "part-0.parquet", {"text": texts, "prompt": ["What?"] * 4})
    a = PromptSettings(prompt_column="question", passthrough=("question",))
    assert score(str(tmp_path / "a"), a, validate_quickstart) == {"ok": 3, "total": 1}
    assert score(str(tmp_path / "b"), PromptSettings(passthrough=("messages",)), validate_quickstart) == {
        "ok": 3,
        "total": 1,
    }
    assert not score(str(tmp_path / "c"), PromptSettings(passthrough=("prompt",)), validate_quickstart)


def test_an_evaluation_reports_each_setting_and_a_finished_one_loads_no_model(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_folder(tmp_path / "model")
    data = write_quickstart_data(tmp_path / "data", 0, num_train_rows=4, num_heldout_rows=6)
    recipe = EvaluateRecipe(
        model=model,
        prompts=PromptSettings(paths=data.heldout_paths, rows_per_unit=4),
        output=str(tmp_path / "out"),
        thresholds=(1.0, 0.0),
        verified_windows=("auto", 3),
        decoding=EvaluationDecodingSettings(max_new_tokens=8, num_slots=4),
        actors=ActorSettings(num_cpus=0.5),
    )
    assert run_evaluation(recipe, dry_run=True) is None and not (tmp_path / "out").exists()
    report = run_evaluation(recipe)
    assert report is not None
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["one_token", "verified_window_auto", "verified_window_3", "tau_1", "tau_0"]
    assert all((row.num_rows, row.num_scored, row.accuracy) == (6, 6, 0.0) for row in report.rows)
    assert rows["one_token"].tokens_per_forward == rows["tau_1"].tokens_per_forward == 1.0
    assert rows["tau_0"].tokens_per_forward > 1.5 and rows["tau_0"].window == BLOCK_SIZE
    identical = {name: row.num_identical for name, row in rows.items() if name != "tau_0"}
    assert set(identical.values()) == {6} and rows["tau_0"].num_identical < 6
    assert (rows["verified_window_auto"].window, rows["verified_window_3"].window) == ("auto", 3)
    forwards = rows["verified_window_3"].forwards_per_window
    assert forwards == {
        "3": round(rows["verified_window_3"].num_generated_tokens / rows["verified_window_3"].tokens_per_forward)
    }
    assert rows["one_token"].query_tokens_per_token < rows["tau_0"].query_tokens_per_token
    texts: list[Any] = [
        ds.dataset(tmp_path / "out" / name).to_table()["token_ids"].to_pylist() for name in ("one_token", "tau_1")
    ]
    assert texts[0] == texts[1]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rows"][0]["name"] == "one_token"
    assert len(report.table().splitlines()) == 2 + 5
    monkeypatch.setattr(evaluation, "InferencePool", None)
    assert run_evaluation(recipe) == report


def test_prompts_of_another_task_have_no_accuracy(ray_session: None, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "What is love?"}, {"prompt": ""}])
    recipe = EvaluateRecipe(
        model=make_model_folder(tmp_path / "model"),
        prompts=PromptSettings(paths=(str(tmp_path / "in.jsonl"),)),
        output=str(tmp_path / "out"),
        thresholds=(),
        verified_windows=(),
        decoding=EvaluationDecodingSettings(max_new_tokens=4, num_slots=2),
        actors=ActorSettings(num_cpus=0.5),
    )
    report = run_evaluation(recipe)
    assert report is not None
    (row,) = report.rows
    assert (row.accuracy, row.num_scored, row.num_rows, row.num_errors) == (None, 0, 2, 1)


def test_tables_are_aligned() -> None:
    table = text_table(("name", "rows", "share"), [["a", 1, 0.5], ["long name", 1000, None]])
    assert table.splitlines() == [
        "name       rows  share",
        "---------  ----  -----",
        "a             1  0.500",
        "long name  1000      -",
    ]
    assert text_table(("a", "bc"), []) == "a  bc\n-  --\n"
    assert facts_table({"a": 1, "long": 123.456}) == "a     1\nlong  123.5\n"
