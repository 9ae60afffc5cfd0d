"""Actors and drivers killed at random moments: every row is there exactly once, with the answer of an unbroken run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_pool import run_locally
from prompt_files import make_model_folder, write_jsonl

from pipelines import storage
from pipelines.generation import open_manifest
from workers.config import ActorSettings, DecodingSettings, GenerateRecipe, PromptSettings

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS, BAD_ROWS = 400, (7, 150, 399)
MOST_SECONDS = 400


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[GenerateRecipe, dict[int, Any]]:
    """A job of about 20 seconds in 80 units, and what it answers when nobody disturbs it, by id."""
    folder = tmp_path_factory.mktemp("kills")
    rows = [{"id": i, "prompt": None if i in BAD_ROWS else f"Say {i}."} for i in range(NUM_ROWS)]
    recipe = GenerateRecipe(
        model=make_model_folder(folder / "model"),
        prompts=PromptSettings(paths=(str(write_jsonl(folder / "in.jsonl", rows)),), rows_per_unit=5),
        output=str(folder / "unbroken"),
        decoding=DecodingSettings(mode="one_token", max_new_tokens=64, min_new_tokens=64, temperature=1.0, num_slots=4),
        actors=ActorSettings(max=2, num_cpus=0.5, max_restarts=50),
    )
    run_locally(recipe)
    return recipe, answers(recipe.output)


def tables(folder: str) -> list[dict[str, Any]]:
    """The rows of all parts that are visible, committed or not; each part must be whole."""
    paths = [info.path for info in storage.list_folder(folder) if info.path[len(folder) + 1 :].startswith("part-")]
    rows = []
    for path in paths:
        rows += pq.read_table(pa.BufferReader(storage.read_bytes(path))).to_pylist()
    return rows


def answers(output: str) -> dict[int, Any]:
    return {row["id"]: row["token_ids"] for row in tables(output)}


def ids_of(output: str) -> Counter[int]:
    return Counter(row["id"] for folder in (output, f"{output}/_errors") for row in tables(folder))


def start(recipe: GenerateRecipe, folder: Path) -> subprocess.Popen[bytes]:
    """The job as a user starts it, on a Ray of its own."""
    (folder / "recipe.yaml").write_text(recipe.model_dump_json())
    command = [sys.executable, str(ROOT / "jobs" / "generate.py"), "--config", str(folder / "recipe.yaml")]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, cwd=folder, stderr=log, stdout=log, start_new_session=True)


def actors_of(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        processes = psutil.Process(driver.pid).children(recursive=True)
        return [each for each in processes if "InferenceActor" in " ".join(each.cmdline())]
    except psutil.NoSuchProcess:
        return []


def disturb(recipe: GenerateRecipe, folder: Path, kills: dict[str, int], random_state: random.Random) -> Counter[str]:
    """Runs the job, however often it takes, with so many kills of actors and of drivers; returns those that there were."""
    left, done = Counter(kills), Counter[str]()
    deadline = time.monotonic() + MOST_SECONDS
    while True:
        driver = start(recipe, folder)
        num_before = len(ids_of(recipe.output))
        while driver.poll() is None:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(random_state.uniform(0.2, 1.5))
            victims = actors_of(driver)
            kind = random_state.choice(sorted(left.elements())) if left.total() else None
            if kind == "actor" and victims:
                random_state.choice(victims).kill()
            elif kind == "driver" and len(ids_of(recipe.output)) > num_before:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
            else:
                continue
            left[kind] -= 1
            done[kind] += 1
            assert max(ids_of(recipe.output).values(), default=1) == 1
        if driver.returncode != -signal.SIGKILL:
            assert driver.returncode == 0, (folder / "log").read_text()
            return done


@pytest.mark.parametrize(
    ("is_on_s3", "kills", "seed"), [(False, {"actor": 3, "driver": 1}, 1), (True, {"actor": 2, "driver": 1}, 2)]
)
def test_every_row_is_there_once_whatever_is_killed(
    base: tuple[GenerateRecipe, dict[int, Any]],
    bucket: str,
    tmp_path: Path,
    is_on_s3: bool,
    kills: dict[str, int],
    seed: int,
) -> None:
    recipe = base[0].model_copy(update={"output": f"{bucket}/out" if is_on_s3 else str(tmp_path / "out")})
    done = disturb(recipe, tmp_path, kills, random.Random(seed))
    assert done["driver"] >= 1 and done["actor"] >= 2, f"{done}: the job was too short to be disturbed"
    assert ids_of(recipe.output) == Counter(range(NUM_ROWS))
    assert answers(recipe.output) == base[1]
    assert {row["id"]: row["error_code"] for row in tables(f"{recipe.output}/_errors")} == dict.fromkeys(
        BAD_ROWS, "null_content"
    )
    report = json.loads(storage.read_bytes(f"{recipe.output}/_report.json"))
    assert (report["num_rows"], report["num_errors"]) == (NUM_ROWS, len(BAD_ROWS)) and report["num_units_before"] > 0
    assert report["num_generated_tokens"] == sum(map(len, base[1].values()))
    assert open_manifest(recipe).check(overwrite=False)  # started again, it would do nothing
    assert is_on_s3 or not [path for path in Path(recipe.output).rglob(".*") if path.is_file()]
