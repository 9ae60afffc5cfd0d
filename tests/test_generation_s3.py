"""Batch inference and evaluation whose output is on S3: resumed from there, left alone when finished, and refused by name."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_pool import KilledError, run_locally
from prompt_files import make_model_folder
from s3_server import StartProxy

from jobs import generate
from pipelines import generation, model_folders, storage
from pipelines.evaluation import run_evaluation
from pipelines.generation import open_manifest, run_generation
from workers.config import (
    ActorSettings,
    DecodingSettings,
    EvaluateRecipe,
    EvaluationDecodingSettings,
    GenerateRecipe,
    PromptSettings,
)
from workers.errors import InputError

NUM_ROWS = 11  # of two files, in units of 3; one row has no prompt


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(model_folder: str, bucket: str) -> GenerateRecipe:
    """Everything on S3, under names that need escaping in a URL."""
    model_folders.publish(model_folder, f"{bucket}/models/tiny")
    for name, start, num_rows in (("a", 0, 7), ("b", 7, 4)):
        rows = [{"id": start + i, "prompt": f"Say {i}." if start + i != 8 else ""} for i in range(num_rows)]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        storage.publish_bytes(f"{bucket}/prompts/{name}.jsonl", data)
    return GenerateRecipe(
        model=f"{bucket}/models/tiny",
        prompts=PromptSettings(paths=(f"{bucket}/prompts",), rows_per_unit=3),
        output=f"{bucket}/nightly runs/50% #1",
        decoding=DecodingSettings(mode="tau", max_new_tokens=6, num_slots=4),
        actors=ActorSettings(num_cpus=0.5),
    )


def rows_of(folder: str) -> list[dict[str, Any]]:
    paths = [info.path for info in storage.list_folder(folder)]
    tables = []
    for path in paths:
        if path[len(folder) + 1 :].startswith("part-"):
            with storage.open_read(path) as file:
                tables.append(pq.read_table(file))
    return pa.concat_tables(tables).to_pylist()


def ids_of(output: str) -> list[int]:
    """All ids, of answers and of errors."""
    return sorted(row["id"] for folder in (output, f"{output}/_errors") for row in rows_of(folder))


def versions(folder: str) -> dict[str, str]:
    return {info.path: info.version for info in storage.list_folder(folder)}


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_killed_job_goes_on_from_what_is_on_s3(recipe: GenerateRecipe, ending: str) -> None:
    output = recipe.output
    recipe = recipe.model_copy(update={"output": output + ending})
    with pytest.raises(KilledError):
        run_locally(recipe, dies_at=2)
    before = versions(output)
    assert f"{output}/part-00000-000002.parquet" in before  # written, but not committed
    assert not storage.exists(f"{output}/_SUCCESS")
    report, decoded = run_locally(recipe)
    assert decoded == ["00000-000002", "00001-000000", "00001-000001"]
    assert (report.num_units, report.num_units_before, report.num_rows) == (5, 2, NUM_ROWS)
    assert ids_of(output) == list(range(NUM_ROWS)) and report.errors == {"empty_content": 1}
    kept = [f"{output}/part-00000-00000{index}.parquet" for index in range(2)]
    assert [versions(output)[path] for path in kept] == [before[path] for path in kept]
    assert json.loads(storage.read_bytes(f"{output}/_report.json")) == json.loads(json.dumps(vars(report)))
    assert open_manifest(recipe).check(overwrite=False)
    decoding = recipe.decoding.model_copy(update={"threshold": 0.5})
    other = open_manifest(recipe.model_copy(update={"decoding": decoding}))
    with pytest.raises(InputError, match=r"^decoding.threshold: .*50% #1"):
        other.check(overwrite=False)


def test_overwriting_takes_the_own_output_only(recipe: GenerateRecipe) -> None:
    run_locally(recipe)
    neighbour = f"{recipe.output}-2/part-0.parquet"
    storage.publish_bytes(neighbour, b"of another job")
    again = recipe.model_copy(update={"overwrite": True})
    report, decoded = run_locally(again)
    assert report.num_units_before == 0 and len(decoded) == 5 and ids_of(recipe.output) == list(range(NUM_ROWS))
    assert storage.read_bytes(neighbour) == b"of another job"
    storage.publish_bytes(f"{recipe.output}/notes.txt", b"mine")
    with pytest.raises(InputError, match=r"^output: .*notes\.txt, which no job of this kind has written"):
        open_manifest(again).check(overwrite=True)


def test_outputs_that_cannot_be_are_refused_before_a_model_loads(recipe: GenerateRecipe, bucket: str) -> None:
    storage.publish_bytes(f"{bucket}/file", b"x")
    for output, message in (
        (f"{bucket}/prompts/out", "^output: .*inside the input"),
        (bucket, "^output: .*around the input"),
        (f"{bucket}/file", "^output: .*a file; expected a folder"),
        (f"{bucket}/file/", "^output: .*a file; expected a folder"),
        ("s3://no-such-bucket/out", "no bucket 'no-such-bucket'"),
    ):
        with pytest.raises(InputError, match=message):
            run_generation(recipe.model_copy(update={"output": output}), dry_run=True)
    assert run_generation(recipe, dry_run=True) is None and not versions(recipe.output)


def test_answers_that_s3_delays_or_loses_cost_no_row(recipe: GenerateRecipe, proxy: StartProxy) -> None:
    """Every third write is refused once or has its answer lost; the attempt after it is done."""

    def fault(method: str, path: str, number: int) -> Any:
        return {0: (503, "SlowDown"), 3: "lost"}.get(number % 6) if method == "PUT" and "50%25" in path else None

    seen = proxy(fault).seen
    report, _ = run_locally(recipe)
    assert sum(method == "PUT" for method, _ in seen) > 3 * 5 + 3
    assert report.num_rows == NUM_ROWS and ids_of(recipe.output) == list(range(NUM_ROWS))


def test_a_job_on_a_cluster_writes_to_s3_and_does_nothing_the_second_time(
    ray_session: Any, recipe: GenerateRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        f"model={recipe.model}",
        f"prompts={{paths: ['{recipe.prompts.paths[0]}'], rows_per_unit: 3}}",
        f"output={recipe.output}",
        "decoding={max_new_tokens: 6, num_slots: 4}",
        "actors.num_cpus=0.5",
    ]
    assert generate.main(arguments) == 0
    assert ids_of(recipe.output) == list(range(NUM_ROWS))
    before = versions(recipe.output)
    monkeypatch.setattr(generation, "InferencePool", None)  # a model that loads now would be a fault
    assert generate.main(arguments) == 0
    assert versions(recipe.output) == before


def test_an_evaluation_is_on_s3_with_its_settings(ray_session: Any, recipe: GenerateRecipe) -> None:
    evaluation = EvaluateRecipe(
        model=recipe.model,
        prompts=recipe.prompts,
        output=recipe.output,
        thresholds=(1.0,),
        verified_windows=(),
        decoding=EvaluationDecodingSettings(max_new_tokens=4, num_slots=4),
        actors=ActorSettings(num_cpus=0.5),
    )
    report = run_evaluation(evaluation)
    assert report is not None
    assert {row.name: (row.num_rows, row.num_identical) for row in report.rows} == {
        "one_token": (NUM_ROWS, NUM_ROWS - 1),
        "tau_1": (NUM_ROWS, NUM_ROWS - 1),
    }
    assert json.loads(storage.read_bytes(f"{recipe.output}/report.json"))["output"] == recipe.output
    assert run_evaluation(evaluation) == report
    assert storage.exists(f"{recipe.output}/tau_1/_SUCCESS")
