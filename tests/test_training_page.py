"""`report.html` of a training run: one file that stands alone, shows what there is, and survives hostile text."""

import json
import re
from pathlib import Path

import pytest
from html_page import Page
from training_facts import metric_line, training_facts, worker_group

from pipelines import storage
from pipelines.charts import MAX_POINTS, thin
from pipelines.html_report import training_page
from pipelines.training_page import PAGE, TrainingPage, changed_settings
from workers.config import DataSettings, DistributedSettings, OptimizationSettings, RunSettings, TrainMarsRecipe
from workers.errors import InputError

HOSTILE = "<script>alert('x')</script>&\"</pre>"


def test_it_shows_state_losses_restarts_rejected_rows_sources_and_settings():
    page = Page(training_page(training_facts()))
    for words in (
        "running mars, step 460/600, 4m40s left in this stage",
        "mars 460/600 4.600 2.800 2.017 2.400 2.100 2.200 920",
        "mars 2026-11-30 03:12:45 UTC 300 40 8 node-3",
        "null content 400 4.00%",
        "a.parquet 9,000 0.500",
        "training.learning_rate 1e-4 5e-06",
        "8 x NVIDIA H200",
        "gpus H200",
        "peft –",
    ):
        assert words in page.text
    assert page.count("svg") == 8
    assert ("meta", {"http-equiv": "refresh", "content": "60"}) in page.tags


def test_each_chart_is_drawn_and_named_and_follows_the_colour_scheme():
    text = training_page(training_facts())
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for drawing in drawings:
        title = re.search(r'role="img" aria-labelledby="([\w-]+)"><title id="\1">(.+?)</title>', drawing)
        assert title is not None and "at step" in title[2]
        assert drawing.count("var(--line-1)") >= 1
        assert not re.search('#[0-9a-f]{6}[";]', drawing)
    assert "held out: 2.4 at step 150, 2.2 at step 450" in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text)) <= {(name, "") for name in ids} | {
        ("", name) for name in ids
    }
    assert "prefers-color-scheme: dark" in text


def test_it_needs_no_network_and_no_other_file():
    text = training_page(training_facts())
    assert not re.search(r"https?://|//cdn|<link|<script|@import|src=", text)


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_hostile_text_is_shown_as_text(state):
    facts = training_facts(
        model=f"/models/{HOSTILE}",
        output=HOSTILE,
        state=state,
        reason=f"OSError: {HOSTILE}",
        data={"samples": 1, "rejected": 1, "reasons": {HOSTILE: 1}, "sources": [{HOSTILE: HOSTILE}]},
        changed_settings=[("data.train", HOSTILE, "[]")],
        recipe=HOSTILE,
        environment={"gpus": [HOSTILE]},
    )
    text = training_page(facts)
    page = Page(text)
    assert page.count("script") == 0
    assert page.text.count("alert('x')") >= 8
    assert f"{state} mars, step 460/600" in page.text
    assert "http-equiv" not in text


def test_numbers_that_are_not_finite_leave_gaps_and_no_chart_is_no_chart():
    lines = [metric_line(1), metric_line(2, loss=float("nan"), grad_norm=None), metric_line(3)]
    stages = training_facts().stages
    stage = type(stages[0])("mars", 10, 10, lines, [worker_group()], False)
    waiting = type(stages[0])("mars2", 10, 10, [], [], False)
    page = Page(training_page(training_facts(stages=[stage, waiting], data=None)))
    assert page.count("svg") == 4
    assert "Not prepared yet." in page.text


def test_a_long_run_is_drawn_with_few_points_that_keep_its_level():
    points = [(float(step), float(step % 2)) for step in range(1, 100_001)]
    drawn = thin(points)
    assert len(drawn) <= MAX_POINTS
    assert drawn[-1][0] == 100_000
    assert {value for _, value in drawn} == {0.5}
    assert thin(points[:5]) == points[:5]


def recipe_of(**sections) -> TrainMarsRecipe:
    return TrainMarsRecipe(sft=OptimizationSettings(num_steps=20), **sections)


def run_page(folder: Path, **sections) -> TrainingPage:
    return TrainingPage(str(folder), recipe_of(**sections), "new llama", {"ray": "2.60.0"})


def write_stage(folder: Path, num_lines: int) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(metric_line(step)) + "\n" for step in range(1, num_lines + 1))
    )
    (folder / "worker_groups.json").write_text(json.dumps([worker_group()]))


@pytest.mark.parametrize(
    ("error", "state", "exit_code"),
    [
        (None, "finished", 0),
        (RuntimeError("worker 1 is gone"), "failed", 1),
        (InputError("data.train", "nothing", "rows"), "failed", 2),
        (KeyboardInterrupt(), "stopped", 1),
    ],
)
def test_it_says_how_the_run_ended(error, state, exit_code, tmp_path):
    write_stage(tmp_path / "mars", 12)
    page = run_page(tmp_path)

    def train() -> None:
        with page:
            page.set_data({"samples": 10, "rejected": 0, "reasons": {}})
            page.add_stage("mars", num_steps=20, epochs=4.0, model=str(tmp_path / "mars" / "model"))
            if error is not None:
                raise error

    if error is None:
        train()
    else:
        with pytest.raises(type(error)):
            train()
    text = Page((tmp_path / PAGE).read_text()).text
    assert f"new llama {state}" in text
    assert f"exit code {exit_code}" in text
    assert error is None or str(error) in text
    assert "12/20 2.400" in text


def test_a_page_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog):
    def refuse(path: str, data: bytes) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(storage, "publish_bytes", refuse)
    with run_page(tmp_path) as page:
        page.refresh()
    assert caplog.text.count("disk full") == 1


def test_settings_that_differ_are_named_with_both_values_and_without_secrets(tmp_path):
    recipe = recipe_of(
        data=DataSettings(train=("a.jsonl",)),
        distributed=DistributedSettings(deepspeed={"comet": {"api_key": "hush"}}),
        run=RunSettings(seed=3),
    )
    changed = {name: (value, default) for name, value, default in changed_settings(recipe)}
    assert changed == {
        "data.train": ('["a.jsonl"]', "[]"),
        "distributed.deepspeed": ('{"comet": {"api_key": "(hidden)"}}', "{}"),
        "run.seed": ("3", "0"),
        "sft.num_steps": ("20", "null"),
    }
    with TrainingPage(str(tmp_path), recipe, "new llama", {}):
        pass
    text = (tmp_path / PAGE).read_text()
    assert "hush" not in text
    assert "mask_token: auto" in text
