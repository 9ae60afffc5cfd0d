"""`ray job submit`: the code travels, paths do not end in Ray's copy of it, and the log carries the exit code."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from prompt_files import make_model_folder

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def submit(ray_session, tmp_path_factory):
    """Submits an entrypoint to the test cluster; returns exit code of the client, what it printed, and MARSRAY_HOME."""
    home = tmp_path_factory.mktemp("home")

    def run(*entrypoint: str, options: tuple[str, ...] = ()) -> tuple[int, str, Path]:
        command = [
            Path(sys.executable).parent / "ray",
            *("job", "submit", "--address", f"http://{ray_session.dashboard_url}", "--working-dir", ROOT, *options),
            *("--runtime-env-json", json.dumps({"env_vars": {"MARSRAY_HOME": str(home)}}), "--"),
            *entrypoint,
        ]
        environment = os.environ | {"RAY_AUTH_MODE": "token"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        return result.returncode, result.stdout + result.stderr, home

    return run


def test_a_submitted_generate_job_writes_below_its_home(submit, tmp_path):
    model = make_model_folder(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": f"Say {i}."}) + "\n" for i in range(5)))
    code, printed, home = submit(
        *("jobs/generate.py", f"model={model}", f"prompts.paths={prompts}", "output=answers"),
        *("decoding.max_new_tokens=4", "actors.num_cpus=0.5", "decoding.mode=one_token"),
    )
    assert code == 0, printed
    assert f"relative paths start at {home} (MARSRAY_HOME)" in printed
    assert "exit code 0" in printed
    assert json.loads((home / "answers" / "_report.json").read_text())["num_results"] == 5


def test_a_submitted_job_with_bad_settings_fails_and_says_why(submit):
    code, printed, _ = submit("python", "jobs/train_mars.py", "training.num_step=3")
    assert code == 1
    assert "training.num_step: found an unknown field" in printed
    assert "exit code 2" in printed


def test_a_nightly_job_that_is_stopped_goes_on_when_it_is_submitted_again(submit, ray_session, tmp_path):
    model = make_model_folder(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": f"Say {i}."}) + "\n" for i in range(400)))
    job = (
        *("jobs/generate.py", "--config", "generate_nightly.yaml"),
        *(f"model={model}", f"prompts.paths={prompts}", "output=nightly", "prompts.rows_per_unit=5"),
        *("decoding.max_new_tokens=64", "decoding.min_new_tokens=64", "decoding.num_slots=4", "actors.num_cpus=0.5"),
    )
    name = f"nightly-{uuid.uuid4().hex}"
    code, printed, home = submit(*job, options=("--no-wait", "--submission-id", name))
    assert code == 0, printed
    output, deadline = home / "nightly", time.monotonic() + 120
    while len(list(output.glob("_manifest/unit-*.json"))) < 3:
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.1)
    stop = ["job", "stop", "--address", f"http://{ray_session.dashboard_url}", name]
    subprocess.run(
        [Path(sys.executable).parent / "ray", *stop], env=os.environ | {"RAY_AUTH_MODE": "token"}, check=True
    )
    assert not (output / "_SUCCESS").exists(), "the job ended before it could be stopped"
    code, printed, _ = submit(*job)
    assert code == 0, printed
    report = json.loads((output / "_report.json").read_text())
    assert 0 < report["num_units_before"] < report["num_units"] == 80
    assert report["comparison"]["num_rows"] == report["comparison"]["num_equal_rows"] > 0
    assert Counter(ds.dataset(output).to_table()["id"].to_pylist()) == Counter(range(400))
    assert "_report.html" in printed
    assert "exit code 0" in printed
