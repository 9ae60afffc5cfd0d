"""A training job with everything on S3: killed, resumed from there, and its model used from there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import command_line
from pipelines import model_folders, storage
from pipelines.generation import run_generation
from pipelines.metrics_board import read_metrics
from pipelines.tokenizer_training import create_model_folder, train_tokenizer
from pipelines.training import run_training
from workers.config import FromScratch, GenerateRecipe, TrainMarsRecipe
from workers.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = FromScratch(vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=2)
LAST_STEP = 16


def upload_inputs(bucket: str, folder: Path) -> None:
    """Two shards and a start model."""
    for name, start in (("a", 0), ("b", 20)):
        rows = [{"prompt": f"Say {i} twice.", "response": f"{i} {i}"} for i in range(start, start + 20)]
        content = "".join(json.dumps(row) + "\n" for row in rows)
        storage.publish_bytes(f"{bucket}/sft data/{name}.jsonl", content.encode())
    create_model_folder(SCRATCH, train_tokenizer(iter(["Say 7 twice."]), vocab_size=300, max_positions=512), folder, 0)
    model_folders.publish(str(folder), f"{bucket}/models/start")


def arguments(bucket: str) -> list[str]:
    return [
        f"data.train={bucket}/sft data",
        "data.max_length=128",
        f"model.path={bucket}/models/start",
        "sft=null",
        f"training={{num_steps: {LAST_STEP}, samples_per_step: 6, learning_rate: 1e-2, row_tokens: 64, micro_batch_rows: 2}}",
        "objective.block_size=4",
        f"run.output={bucket}/runs/50% mars/",
        "run.log_every=1",
        "run.checkpoint_every=2",
        "run.num_to_keep=1",
    ]


def checkpoints(run: str) -> list[str]:
    start = len(f"{run}/mars/checkpoints/")
    found = {info.path[start:].split("/")[0] for info in storage.list_folder(f"{run}/mars/checkpoints")}
    return sorted(name for name in found if name.startswith("step-"))


def newest_committed(run: str) -> int:
    """The step of the newest checkpoint that Ray Train has written down as whole; 0 before the first."""
    path = f"{run}/mars/checkpoints/checkpoint_manager_snapshot.json"
    if not storage.exists(path):
        return 0
    try:
        snapshot = json.loads(storage.read_bytes(path))
    except InputError:  # replaced while it was read: the next look finds the new one
        return 0
    name = snapshot["latest_checkpoint_result"]["checkpoint_dir_name"]
    return int(name.removeprefix("step-"))


def kill_after_a_checkpoint(bucket: str, run: str, folder: Path) -> int:
    """Starts the job as a user does and kills all of it after a checkpoint; returns the step of the newest whole one."""
    command = [sys.executable, str(ROOT / "jobs" / "train_mars.py"), *arguments(bucket)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True)
    deadline = time.monotonic() + 300
    while newest_committed(run) < 4 and driver.poll() is None:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)  # each look asks the server, which shares the cores with the run
    was_running = driver.poll() is None
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert was_running, "the run ended before it could be killed"
    return newest_committed(run)


def test_a_killed_run_on_s3_goes_on_and_its_model_decodes(ray_session, bucket, tmp_path):
    run = f"{bucket}/runs/50% mars"
    upload_inputs(bucket, tmp_path / "start")
    step = kill_after_a_checkpoint(bucket, run, tmp_path)
    assert 4 <= step < LAST_STEP
    before = read_metrics(f"{run}/mars/metrics.jsonl")
    assert not storage.exists(f"{run}/report.json")
    # An upload that was cut off: newer than all others, but Ray Train has not written it down.
    storage.publish_bytes(f"{run}/mars/checkpoints/step-{LAST_STEP:08d}/state/half", b"nothing to load")

    recipe, _ = command_line.parse(TrainMarsRecipe, "train_mars.yaml", arguments(bucket))
    report = run_training(recipe)
    assert json.loads(storage.read_bytes(f"{run}/report.json")) == report
    lines = read_metrics(f"{run}/mars/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, LAST_STEP + 1))
    kept = [line for line in before if line["step"] <= step]
    assert kept
    assert lines[: len(kept)] == kept, "steps before the checkpoint were done again"
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert checkpoints(run) == [f"step-{LAST_STEP:08d}"]

    stored = [(info.path, info.version) for info in storage.list_folder(bucket)]
    assert run_training(recipe) == report
    assert [(info.path, info.version) for info in storage.list_folder(bucket)] == stored

    assert report["model"] == f"{run}/mars/model"
    folder = model_folders.fetch(report["model"])
    trained, start = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "start"))
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    check_generation(report["model"], folder, bucket, tmp_path)


def check_generation(model: str, folder: str, bucket: str, tmp_path: Path) -> None:
    """`jobs/generate.py` with model and prompts on S3 gives what `transformers` gives with the copy of the model."""
    prompt = "Say 7 twice."
    storage.publish_bytes(f"{bucket}/prompts.jsonl", json.dumps({"prompt": prompt}).encode())
    answers = run_generation(
        GenerateRecipe(
            model=model,
            prompts={"paths": (f"{bucket}/prompts.jsonl",)},
            output=str(tmp_path / "answers"),
            decoding={"mode": "one_token", "max_new_tokens": 5, "num_slots": 2},
            actors={"num_cpus": 0.5},
        )
    )
    assert answers is not None
    assert answers.num_results == 1
    tokens = pq.read_table(next((tmp_path / "answers").glob("part-*.parquet")))["token_ids"][0].as_py()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    expected = AutoModelForCausalLM.from_pretrained(folder).generate(inputs, max_new_tokens=5, do_sample=False)
    assert tokens == expected[0, inputs.shape[1] :].tolist()
