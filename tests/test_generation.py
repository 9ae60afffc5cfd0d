"""Batch inference: each row once, whatever is wrong with its neighbours and whatever is killed."""

import asyncio
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from prompt_files import BLOCK_SIZE, make_model_folder, write_jsonl, write_parquet

from jobs import generate
from jobs.command_line import parse
from pipelines import generation, inference_pool
from pipelines.generation import model_setup, open_manifest, resolve_recipe, run_generation
from pipelines.inference_actor import InferenceActor
from pipelines.inference_pool import PoolError
from pipelines.manifest import UnitEntry
from pipelines.prompt_preflight import check_prompt_set
from pipelines.row_requests import RequestBuilder, RowFault
from pipelines.unit_output import OutputTask
from pipelines.work_units import PromptRow, UnitRows
from workers.config import ActorSettings, DecodingSettings, GenerateRecipe, PromptSettings
from workers.decoding.request import Request
from workers.errors import InputError
from workers.models.folder import load_tokenizer

DECODING = DecodingSettings(mode="tau", max_new_tokens=6, num_slots=4)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def recipe(model: str, paths: Path, output: Path, **changes: Any) -> GenerateRecipe:
    prompts = PromptSettings(
        paths=(str(paths),), rows_per_unit=changes.pop("rows_per_unit", 4), **changes.pop("prompts", {})
    )
    actors = ActorSettings(num_cpus=0.5, max_restarts=2)
    values: dict[str, Any] = {
        "model": model,
        "prompts": prompts,
        "output": str(output),
        "decoding": DECODING,
        "actors": actors,
    }
    return GenerateRecipe(**{**values, **changes})


def decode_here(recipe: GenerateRecipe) -> None:
    """The job without Ray: one actor in this process, two units at a time."""
    prompt_set = check_prompt_set(recipe.prompts, recipe.output)
    task = OutputTask(recipe.output, recipe.prompts, recipe.decoding, prompt_set.id_type, prompt_set.extra)
    actor = InferenceActor(model_setup(str(recipe.model), recipe.decoding, uses_gpu=False), recipe.decoding)

    async def run() -> None:
        await actor.load()
        await asyncio.gather(*(actor.decode_unit(task, unit) for unit in prompt_set.read()))

    asyncio.run(run())


def answers(output: Path) -> list[dict[str, Any]]:
    return ds.dataset(output).to_table().to_pylist()


def errors(output: Path) -> list[dict[str, Any]]:
    return ds.dataset(output / "_errors").to_table().to_pylist()


def codes(output: Path) -> dict[Any, str]:
    return {row["id"]: row["error_code"] for row in errors(output)}


def write_faulty_shards(folder: Path) -> None:
    """Case 9 without its shard of string ids: 40 prompts, some of which cannot be done."""
    prompts: list[Any] = [f"Hello {i}" for i in range(10)]
    write_parquet(folder / "a.parquet", {"id": list(range(10)), "prompt": prompts})
    write_parquet(
        folder / "b.parquet",
        {
            "id": list(range(10, 20)),
            "prompt": [None, "", "  \n\t", "word " * 10_000, *prompts[4:]],
            "seed": [None] * 9 + [1.0],
        },
    )
    turns = [[{"role": role, "content": "Hi"}] for role in ["user"] * 6 + ["wizard", "assistant", "user", "user"]]
    write_parquet(folder / "c.parquet", {"id": list(range(20, 30)), "messages": turns})
    rows: list[Any] = [{"id": 30 + i, "prompt": "Hello"} for i in range(8)]
    rows[1]["mode"] = "fast"
    rows[2] |= {"threshold": 0.5, "mode": "one_token"}
    rows[3] |= {"mode": "one_token", "window": 4.0, "stop": "x", "max_new_tokens": 2}
    rows[4]["messages"] = turns[0]
    rows[5]["max_new_tokens"] = 0
    write_jsonl(folder / "d.jsonl", [*rows, b'{"id": 38', b"7"])


def test_bad_rows_become_errors_and_cost_no_other_row(model_folder: str, tmp_path: Path) -> None:
    write_faulty_shards(tmp_path / "in")
    output = tmp_path / "out"
    decode_here(recipe(model_folder, tmp_path / "in", output))
    assert codes(output) == {
        10: "null_content",
        11: "empty_content",
        12: "empty_content",
        13: "prompt_too_long",
        26: "unknown_role",
        27: "no_turn_before_the_answer",
        31: "invalid_settings",
        32: "invalid_settings",
        34: "two_prompts",
        35: "invalid_settings",
        None: "malformed_json_line",
    }
    done = [row["id"] for row in answers(output)]
    assert len(done) + len(errors(output)) == 40
    assert sorted(done) == sorted(set(range(38)) - codes(output).keys())
    locations = {row["location"] for row in errors(output)}
    assert f"{tmp_path}/in/b.parquet row 3" in locations and f"{tmp_path}/in/d.jsonl line 10" in locations
    by_id = {row["id"]: row for row in answers(output)}
    assert by_id[33]["num_generated_tokens"] <= 2 and by_id[33]["num_forwards"] == by_id[33]["num_generated_tokens"]


def test_all_files_have_one_schema(model_folder: str, tmp_path: Path) -> None:
    write_faulty_shards(tmp_path / "in")
    write_parquet(tmp_path / "in" / "z.parquet", {"id": [100, 101], "prompt": ["", None]})
    output = tmp_path / "out"
    decode_here(recipe(model_folder, tmp_path / "in", output))
    parts, faults = sorted(output.glob("part-*")), sorted((output / "_errors").glob("part-*"))
    assert [path.name for path in parts] == [path.name for path in faults] and len(parts) == 13
    result_schemas = {str(pq.read_schema(path)) for path in parts}
    assert len(result_schemas) == 1 and len({str(pq.read_schema(path)) for path in faults}) == 1
    assert pq.read_schema(parts[0]).names == [
        "id",
        "text",
        "token_ids",
        "finish_reason",
        "num_prompt_tokens",
        "num_generated_tokens",
        "num_forwards",
        "forwards_per_window",
    ]
    assert pq.read_schema(faults[0]).names == ["id", "error_code", "message", "location"]
    assert pq.read_schema(faults[0]).field("id").type == pa.int64()


def test_answers_do_not_depend_on_units_slots_and_neighbours(model_folder: str, tmp_path: Path) -> None:
    """Temperature 1: the noise follows the row's id, not its place."""
    prompts = [f"Tom packs {i}" for i in range(7)]
    write_parquet(tmp_path / "in.parquet", {"id": list(range(7)), "prompt": prompts, "note": list("abcdefg")})
    texts = []
    for rows_per_unit, num_slots in ((1, 1), (3, 2), (100, 8)):
        output = tmp_path / f"out-{rows_per_unit}"
        decoding = DECODING.model_copy(update={"num_slots": num_slots, "temperature": 1.0, "max_new_tokens": 12})
        options: dict[str, Any] = {
            "rows_per_unit": rows_per_unit,
            "decoding": decoding,
            "prompts": {"passthrough": ("note",)},
        }
        decode_here(recipe(model_folder, tmp_path / "in.parquet", output, **options))
        rows = sorted(answers(output), key=lambda row: row["id"])
        assert [row["note"] for row in rows] == list("abcdefg")
        texts.append([row["token_ids"] for row in rows])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(map(tuple, texts[0]))) == 7


def test_a_job_reports_what_it_wrote_and_a_finished_one_is_left_alone(
    ray_session: None, model_folder: str, tmp_path: Path
) -> None:
    write_faulty_shards(tmp_path / "in")
    job = recipe(model_folder, tmp_path / "in", tmp_path / "out")
    report = run_generation(job)
    assert report is not None
    done = answers(tmp_path / "out")
    assert (report.num_rows, report.num_results, report.num_errors) == (40, len(done), len(errors(tmp_path / "out")))
    assert report.errors == Counter(row["error_code"] for row in errors(tmp_path / "out"))
    assert report.num_generated_tokens == sum(len(row["token_ids"]) for row in done)
    assert report.tokens_per_forward == report.num_generated_tokens / sum(row["num_forwards"] for row in done)
    kept = {int(num_kept): count for num_kept, count in report.kept_per_forward.items()}
    assert sum(kept.values()) == report.num_forwards == sum(row["num_forwards"] for row in done)
    assert sum(num_kept * count for num_kept, count in kept.items()) == report.num_generated_tokens
    # Each prompt once, each kept token but a row's last, and the placeholders.
    num_clean = report.num_prompt_tokens + report.num_generated_tokens - report.num_results
    assert num_clean <= report.num_query_tokens <= num_clean + report.num_forwards * (BLOCK_SIZE - 1)
    assert report.query_tokens_per_token == report.num_query_tokens / report.num_generated_tokens
    assert report.exit_code == 0 and (tmp_path / "out" / "_SUCCESS").exists()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert run_generation(job) == report
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == times
    with pytest.raises(InputError, match="^decoding.threshold: "):
        run_generation(job.model_copy(update={"decoding": DECODING.model_copy(update={"threshold": 0.5})}))
    strict = job.model_copy(update={"overwrite": True, "max_error_share": 0.1})
    again = run_generation(strict)
    assert again is not None and again.exit_code == 3 and again.num_units_before == 0
    assert "unknown_role" in again.table()
    lenient = run_generation(strict.model_copy(update={"overwrite": False, "max_error_share": 0.5}))
    assert lenient is not None and lenient.exit_code == 0


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int], None]:
    """Lets actors die in the middle of one unit: call it with the unit and the number of deaths."""

    def arm(unit: str, times: int) -> None:
        log = tmp_path / "kills"

        class Killed(InferenceActor):  # local, so that it travels by value
            async def decode_unit(self, task: OutputTask, unit_rows: UnitRows) -> UnitEntry:
                num_deaths = len(log.read_text().split()) if log.exists() else 0
                if unit_rows.unit.name == unit and num_deaths < times:
                    log.write_text(f"{unit} " * (num_deaths + 1))
                    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGKILL)
                return await super().decode_unit(task, unit_rows)

        monkeypatch.setattr(inference_pool, "InferenceActor", Killed)

    return arm


def write_case_10(folder: Path) -> None:
    for shard in range(4):
        ids = list(range(5 * shard, 5 * shard + 5))
        write_parquet(folder / f"{shard}.parquet", {"id": ids, "prompt": [f"Hello {i}" for i in ids]})


def test_a_killed_actor_is_replaced_and_each_row_is_there_once(
    ray_session: None, model_folder: str, tmp_path: Path, arm: Callable[[str, int], None]
) -> None:
    write_case_10(tmp_path / "in")
    arm("00002-000000", 2)
    report = run_generation(recipe(model_folder, tmp_path / "in", tmp_path / "out", rows_per_unit=3))
    assert (tmp_path / "kills").read_text().split() == ["00002-000000"] * 2
    assert report is not None and report.num_restarts == 2 and report.num_results == 20
    assert sorted(row["id"] for row in answers(tmp_path / "out")) == list(range(20))


def test_a_failed_job_is_resumed_and_then_left_alone(
    ray_session: None,
    model_folder: str,
    tmp_path: Path,
    arm: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 10: killed at row 12, resumed, started a third time; then null ids and duplicate ids."""
    write_case_10(tmp_path / "in")
    output = tmp_path / "out"
    job = recipe(model_folder, tmp_path / "in", output, rows_per_unit=3)
    arm("00002-000000", 99)
    with pytest.raises(PoolError, match="died 3 times during unit 00002-000000"):
        run_generation(job)
    before = {row["id"] for row in answers(output)}
    assert before and not (output / "_SUCCESS").exists()
    monkeypatch.undo()
    (output / ".part-00003-000000.parquet.abc.tmp").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in output.glob("part-*")}
    report = run_generation(job)
    assert report is not None and 0 < report.num_units_before < report.num_units == 8
    assert sorted(row["id"] for row in answers(output)) == list(range(20))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert run_generation(job) == report
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == times
    assert not list(output.rglob(".*"))

    monkeypatch.setattr(generation, "InferencePool", None)  # a model that loads now would be a fault
    write_parquet(tmp_path / "in" / "4.parquet", {"id": [20, None], "prompt": ["p", "p"]})
    fresh = job.model_copy(update={"output": str(tmp_path / "fresh")})
    with pytest.raises(InputError, match=r"null id: .*4\.parquet row 1"):
        run_generation(fresh)
    write_parquet(tmp_path / "in" / "4.parquet", {"id": [20, 12], "prompt": ["p", "p"]})
    with pytest.raises(InputError, match=r"12 at .*2\.parquet row 2 and .*4\.parquet row 1"):
        run_generation(fresh)
    write_parquet(tmp_path / "in" / "4.parquet", {"id": ["20", "21"], "prompt": ["p", "p"]})
    with pytest.raises(InputError, match="integer ids at .* and string ids at"):
        run_generation(fresh)
    assert not (tmp_path / "fresh").exists()


def test_a_broken_model_folder_is_the_users_error_from_the_actor(ray_session: None, tmp_path: Path) -> None:
    folder = Path(make_model_folder(tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    write_parquet(tmp_path / "in.parquet", {"prompt": ["p"]})
    with pytest.raises(InputError, match="weights"):
        run_generation(recipe(str(folder), tmp_path / "in.parquet", tmp_path / "out"))


def test_a_broken_model_folder_costs_nothing(ray_session: None, model_folder: str, tmp_path: Path) -> None:
    """Once, overwrite=true had deleted the earlier answers before an actor found that the new model cannot be loaded."""
    broken = Path(make_model_folder(tmp_path / "model"))
    (broken / "model.safetensors").unlink()
    path = write_parquet(tmp_path / "in.parquet", {"prompt": ["p", ""]})
    arguments = [f"prompts.paths={path}", f"output={tmp_path}/out", "decoding.max_new_tokens=4"]
    assert generate.main([f"model={broken}", *arguments]) == 2
    assert not (tmp_path / "out").exists()
    good = recipe(model_folder, path, tmp_path / "out")
    open_manifest(good).start(overwrite=False)
    decode_here(good)
    before = {path: path.is_file() and path.read_bytes() for path in (tmp_path / "out").rglob("*")}
    assert before
    assert generate.main([f"model={broken}", *arguments, "overwrite=true"]) == 2
    assert {path: path.is_file() and path.read_bytes() for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "mode", "threshold"),
    [
        ([], "verified", None),
        (["decoding.mode=tau"], "tau", 0.95),
        (["decoding.mode=tau", "decoding.threshold=0.5"], "tau", 0.5),
        (["decoding.threshold=1"], "tau", 1.0),
        (["decoding.mode=one_token"], "one_token", None),
    ],
)
def test_a_threshold_belongs_to_tau_mode(arguments: list[str], mode: str, threshold: float | None) -> None:
    job, _ = parse(GenerateRecipe, "generate.yaml", arguments)
    assert (job.decoding.mode, job.decoding.threshold) == (mode, threshold)
    # A resolved recipe, as a dry run prints it, is a recipe.
    assert GenerateRecipe.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize("window", ["0", "65", "wide", "1.5"])
def test_an_impossible_window_is_refused_in_one_sentence(window: str) -> None:
    with pytest.raises(
        InputError, match=r"^decoding\.window: found .*; expected an integer from 1 to 64, or auto\. See --help\.$"
    ):
        parse(GenerateRecipe, "generate.yaml", [f"decoding.window={window}"])


def test_a_threshold_with_one_token_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="^decoding: .*no threshold with mode one_token"):
        parse(GenerateRecipe, "generate.yaml", ["decoding.mode=one_token", "decoding.threshold=0.5"])


@pytest.mark.parametrize(
    ("job", "row", "expected"),
    [
        ({"mode": "one_token"}, {"threshold": 0.5}, ("tau", 0.5)),
        ({"mode": "one_token"}, {"mode": "tau"}, ("tau", 0.95)),
        ({"mode": "tau", "threshold": 0.5}, {"mode": "one_token"}, ("one_token", None)),
        ({"mode": "tau", "threshold": 0.5}, {"window": 2}, ("tau", 0.5)),
        ({"mode": "tau", "threshold": 0.5}, {"mode": "one_token", "threshold": 0.5}, None),
        ({"mode": "one_token"}, {"threshold": -1.0}, None),
    ],
)
def test_a_row_overrides_mode_and_threshold_together(
    model_folder: str, job: dict[str, Any], row: dict[str, Any], expected: tuple[str, float | None] | None
) -> None:
    builder = RequestBuilder(
        load_tokenizer(model_folder),
        end_ids=frozenset(),
        prompt_format="chat",
        prompts=PromptSettings(),
        decoding=DecodingSettings(**job),
    )
    request = builder.build(PromptRow(0, "here", {"prompt": "Hi", **row}, ""))
    if expected is None:
        assert isinstance(request, RowFault) and request.code == "invalid_settings" and "threshold" in request.message
    else:
        assert isinstance(request, Request)
        assert (request.decoding.mode, request.decoding.threshold) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": -1}, "marsray.json, mask_token_id: found -1; expected a token id of the model, 0..319"),
        ({"mask_token_id": 320}, "marsray.json, mask_token_id: found 320; expected a token id of the model, 0..319"),
        ({"block_size": 0}, "marsray.json, block_size: found 0; expected 1..64"),
        ({"block_size": 65}, "marsray.json, block_size: found 65; expected 1..64"),
        ({"prompt_format": "html"}, "marsray.json, prompt_format: found 'html'; expected chat or raw"),
    ],
)
def test_impossible_multi_token_settings_are_refused_by_file_and_field(
    model_folder: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    values = json.loads((folder / "marsray.json").read_text())
    (folder / "marsray.json").write_text(json.dumps(values | changes))
    with pytest.raises(InputError, match=re.escape(message)):
        model_setup(str(folder), DECODING, uses_gpu=False)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, bucket: str) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"prompt": ["p"]})
    for model, found in ((f"{bucket}/model", "no config.json"), (f"{tmp_path}/absent", "no folder there")):
        with pytest.raises(InputError, match=f"{model}: found {found}"):
            run_generation(recipe(model, path, tmp_path / "out"), dry_run=True)


def test_a_window_beyond_the_block_size_is_warned_of_where_the_user_reads(
    model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    for window in (None, BLOCK_SIZE, BLOCK_SIZE + 1):
        model_setup(model_folder, DecodingSettings(window=window), uses_gpu=False)
    assert [record.getMessage() for record in caplog.records if record.name == "pipelines.generation"] == [
        "window 5 is larger than 4, the block size that the model was trained with"
    ]


def test_a_dry_run_checks_and_writes_nothing(model_folder: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"prompt": ["p"]})
    assert run_generation(recipe(model_folder, path, tmp_path / "out"), dry_run=True) is None
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="no folder|no such"):
        run_generation(recipe(str(tmp_path / "absent"), path, tmp_path / "out"), dry_run=True)
    with pytest.raises(InputError, match="^output: "):
        run_generation(recipe(model_folder, path, path), dry_run=True)
    too_long = DECODING.model_copy(update={"max_length": 257})
    with pytest.raises(InputError, match="^decoding.max_length: found 257; expected at most the model's 256 positions"):
        run_generation(recipe(model_folder, path, tmp_path / "out", decoding=too_long), dry_run=True)


def test_without_model_and_prompts_the_newest_example_run_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARSRAY_HOME", str(tmp_path))
    with pytest.raises(InputError, match="^model: found null"):
        resolve_recipe(GenerateRecipe())
    run = tmp_path / "runs" / "train"
    (run / "example").mkdir(parents=True)
    (run / "report.json").write_text(json.dumps({"model": f"{run}/mars/model"}))
    resolved = resolve_recipe(GenerateRecipe(output="runs/x"))
    assert (resolved.model, resolved.output) == (f"{run}/mars/model", f"{tmp_path}/runs/x")
    assert resolved.prompts.paths == (f"{run}/example/heldout",)
    assert resolve_recipe(GenerateRecipe(model="other")).model == f"{tmp_path}/other"


def test_an_ordinary_model_decodes_one_token_at_a_time(tmp_path: Path) -> None:
    folder = Path(make_model_folder(tmp_path / "model"))
    assert model_setup(str(folder), DECODING, uses_gpu=False).block_size == BLOCK_SIZE
    (folder / "marsray.json").unlink()
    with pytest.raises(InputError, match="^decoding.mode: found tau"):
        model_setup(str(folder), DECODING, uses_gpu=False)
    one_token = DecodingSettings(mode="one_token", max_new_tokens=6, num_slots=4)
    assert model_setup(str(folder), one_token, uses_gpu=False).block_size == 1
    write_parquet(tmp_path / "in.parquet", {"prompt": ["p", "q"]})
    decode_here(recipe(str(folder), tmp_path / "in.parquet", tmp_path / "out", decoding=one_token))
    assert all(row["num_forwards"] == row["num_generated_tokens"] for row in answers(tmp_path / "out"))
