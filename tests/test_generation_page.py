"""`_report.html` of a generate job: one file that stands alone and shows what the report has, whatever texts it holds."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st
from local_pool import KilledError, run_locally
from prompt_files import make_model_folder, write_jsonl

from pipelines.comparison import Comparison
from pipelines.generation_page import generation_page
from pipelines.generation_report import GenerationReport
from pipelines.manifest import Manifest, Totals, UnitEntry
from pipelines.throughput import Throughput, progress_note, tokens_per_second
from pipelines.top_rows import NUM_SHOWN, RowFigures, longest, slowest
from workers.config import DecodingSettings, GenerateRecipe, PromptSettings

HOSTILE = "<script>alert('x')</script>&\"</pre>"


def facts(**changes: Any) -> GenerationReport:
    row = RowFigures("/in/a.jsonl line 7", 12.5, 900, 300)
    values: dict[str, Any] = {
        "num_rows": 2000,
        "num_results": 1990,
        "num_errors": 10,
        "errors": {"null_content": 3, "prompt_too_long": 7},
        "num_prompt_tokens": 40_000,
        "num_generated_tokens": 120_000,
        "num_forwards": 50_000,
        "num_query_tokens": 300_000,
        "tokens_per_forward": 2.4,
        "query_tokens_per_token": 2.5,
        "kept_per_forward": {"1": 20_000, "2": 10_000, "4": 20_000},
        "forwards_per_window": {"4": 40_000, "4+branches": 10_000},
        "tokens_per_second": 800.0,
        "seconds": 150.0,
        "num_units": 8,
        "num_units_before": 2,
        "num_restarts": 1,
        "actors_over_time": [[2.0, 1], [9.0, 2], [140.0, 1]],
        "actor_seconds": 280.0,
        "actor_utilisation": 0.913,
        "slot_occupancy": 0.874,
        "tokens_over_time": [[75.0, 700.0], [150.0, 900.0]],
        "slowest_rows": [dataclasses.asdict(row)],
        "longest_rows": [dataclasses.asdict(row)],
        "comparison": dataclasses.asdict(Comparison(20, 19, 800, 780, ["/in/a.jsonl line 3"])),
        "cost": 0.35,
        "exit_code": 0,
        "output": "/out",
        "settings": json.loads(
            GenerateRecipe(model="/models/m", prompts=PromptSettings(paths=("/in",))).model_dump_json()
        ),
        "environment": {"ray": "2.60.0", "gpus": ["H200"], "peft": None},
    }
    return GenerationReport(**{**values, **changes})


def test_it_shows_figures_errors_rows_and_use_of_the_actors() -> None:
    page = Page(generation_page(facts()))
    for words in (
        "Answers of m finished after 2m30s",
        "rows 2,000 answers 1,990 rows without an answer 10",
        "tokens/forward 2.400",
        "compared with one token 20 of these the same 0.950 share of tokens before a difference 0.975",
        "The first of those that were compared: /in/a.jsonl line 3.",
        "4+branches 10,000 20.00%",
        "spent in decoding steps 91.3% slots in use 87.4% actors replaced 1 cost 0.350",
        "prompt_too_long 7 0.35% null_content 3 0.15%",
        "/in/a.jsonl line 7 12.500 900 300",
        "gpus H200",
        "peft –",
    ):
        assert words in page.text
    assert page.count("svg") == 3


def test_it_stands_alone_and_takes_no_text_for_markup() -> None:
    row = [{"location": HOSTILE, "seconds": 1.0, "num_tokens": 1, "num_forwards": 1}]
    settings = facts().settings | {"model": HOSTILE}
    text = generation_page(facts(output=HOSTILE, slowest_rows=row, errors={HOSTILE: 1}, settings=settings))
    page = Page(text)
    assert page.count("script") == 0 and "<script" not in text
    outside = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(str(value).startswith("#") for value in outside) and "http" not in re.sub(r"http-equiv", "", text)


def test_charts_are_a_histogram_a_curve_and_a_staircase() -> None:
    text = generation_page(facts())
    titles = re.findall(r"<title id=[^>]*>(.*?)</title>", text)
    assert titles == [
        "Tokens that a forward kept. forwards: 2e+04 at tokens kept 1, 2e+04 at tokens kept 4.",
        "Throughput. tokens/s: 700 at second 75, 900 at second 150.",
        "Actors that are ready. actors: 1 at second 2, 1 at second 140.",
    ]


def test_a_job_without_any_answer_has_a_page() -> None:
    nothing = {"kept_per_forward": {}, "forwards_per_window": {}, "tokens_over_time": [], "actors_over_time": []}
    page = Page(generation_page(facts(**nothing, slowest_rows=[], longest_rows=[], cost=None, exit_code=3)))
    assert page.count("svg") == 0 and "failed more rows without an answer than max_error_share=1 allows" in page.text
    assert "Rows without an answer None." in Page(generation_page(facts(errors={}))).text


def test_a_job_writes_its_page_and_rows_that_stand_out_survive_a_kill(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"Say {i}.", "max_new_tokens": 2 + i} for i in range(9)]
    prompts = write_jsonl(tmp_path / "in.jsonl", [*rows, {"id": 9, "prompt": None}])
    recipe = GenerateRecipe(
        model=make_model_folder(tmp_path / "model"),
        prompts=PromptSettings(paths=(str(prompts),), rows_per_unit=3),
        output=str(tmp_path / "out"),
        decoding=DecodingSettings(mode="one_token", min_new_tokens=20, num_slots=4),
        price_per_actor_hour=7200.0,
    )
    with pytest.raises(KilledError):
        run_locally(recipe, dies_at=2)
    assert not (tmp_path / "out" / "_report.html").exists()
    report, decoded = run_locally(recipe)
    assert len(decoded) == 2
    assert [row["num_tokens"] for row in report.longest_rows] == [10, 9, 8, 7, 6]
    assert report.longest_rows[0]["location"] == f"{prompts} line 9"
    assert all(row["num_forwards"] == row["num_tokens"] for row in report.longest_rows)
    seconds = [row["seconds"] for row in report.slowest_rows]
    assert len(seconds) == NUM_SHOWN and seconds == sorted(seconds, reverse=True) and seconds[0] > 0
    assert report.cost == pytest.approx(2.0) and 0 < report.slot_occupancy <= 1
    assert (tmp_path / "out" / "_report.html").read_text() == generation_page(report)
    assert GenerationReport(**Manifest(recipe.output, {}).report()) == report
    assert f"page                {recipe.output}/_report.html" in report.table()


@given(st.lists(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 9)), max_size=9), max_size=6))
def test_the_rows_that_stand_out_are_those_of_the_whole_set(units: list[list[tuple[float, int]]]) -> None:
    totals, every = Totals(), []
    for number, unit in enumerate(units):
        rows = [
            RowFigures(f"{number} row {place:03d}", seconds, tokens, 1) for place, (seconds, tokens) in enumerate(unit)
        ]
        every += rows
        totals.add(UnitEntry(str(number), 0, 0, {}, 0, 0, 0, slowest_rows=slowest(rows), longest_rows=longest(rows)))
    assert totals.slowest_rows == slowest(every) and totals.longest_rows == longest(every)


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(0, 100)), min_size=1, max_size=50), st.integers(1, 20))
def test_no_token_is_lost_between_the_spans(steps: list[tuple[float, int]], num_spans: int) -> None:
    points, now, total = [], 0.0, 0
    for seconds, tokens in steps:
        now, total = now + seconds, total + tokens
        points.append((now, total))
    rates = tokens_per_second(points, num_spans)
    assert len(rates) == num_spans and rates[-1][0] == pytest.approx(now, abs=0.01)
    assert sum(rate for _, rate in rates) * now / num_spans == pytest.approx(total, abs=0.01 * now + 0.01)


def test_a_long_job_has_as_few_points_as_a_short_one() -> None:
    throughput = Throughput()
    for second in range(1, 100_001):
        throughput.add(float(second), 50 * second)
    rates = throughput.over_time()
    assert len(rates) == 60 and rates[-1][0] == 100_000
    assert all(rate == pytest.approx(50, rel=0.1) for _, rate in rates)


def test_progress_tells_the_pace_of_this_start() -> None:
    before, now = (
        Totals(num_rows=100, num_generated_tokens=5000, num_forwards=5000),
        Totals(num_rows=160, num_generated_tokens=8000, num_forwards=6500),
    )
    now.errors["null_content"] = 4
    assert progress_note(before, now, 400, 30.0) == (
        "2.0 rows/s, 100 tokens/s, 2.00 tokens/forward, 4 errors, 2m00s left"
    )
    assert progress_note(before, now, 160, 30.0).endswith("4 errors")
