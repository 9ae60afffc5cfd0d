"""Training runs through Ray Data, Ray Train and DeepSpeed: what they leave, what they refuse, how they resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import arguments, losses, metric_lines, recipe_of, write_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import train_mars, train_sft
from pipelines.tokenizer_training import create_model_folder, train_tokenizer
from pipelines.training import run_training
from workers.config import FromScratch
from workers.errors import InputError
from workers.models.folder import read_multi_token_settings

ROOT = Path(__file__).resolve().parent.parent


def test_both_stages_leave_ordinary_model_folders(finished):
    shard, output, report = finished
    assert report["data"] == {
        "samples": 40,
        "rejected": 1,
        "reasons": {"null content": 1},
        "sources": [{"path": str(shard), "weight": 1.0, "rows": 40, "samples_per_epoch": 40.0}],
    }
    for stage, block_size in (("sft", 1), ("mars", 4)):
        folder = output / stage / "model"
        settings = read_multi_token_settings(str(folder))
        assert settings is not None
        assert settings.block_size == block_size
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.mask_token_id == settings.mask_token_id
        model = AutoModelForCausalLM.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Say 7 twice."}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        answer = model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert settings.mask_token_id not in answer
        assert report["stages"][stage]["model"] == str(folder)
    assert report["model"] == str(output / "mars" / "model")
    assert json.loads((output / "report.json").read_text()) == report


def test_the_loss_falls_and_the_weights_move(finished):
    _, output, _ = finished
    curve = losses(output, "mars")
    assert len(curve) == 8
    assert curve[8] < curve[1]
    before = AutoModelForCausalLM.from_pretrained(output / "sft" / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(output / "mars" / "model").state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_the_run_can_be_seen_the_morning_after(finished):
    _, output, report = finished
    events = EventAccumulator(str(output / "mars" / "tensorboard"))
    events.Reload()
    curve = {point.step: point.value for point in events.Scalars("loss")}
    assert curve == pytest.approx(losses(output, "mars"), abs=1e-5)
    lines = metric_lines(output, "mars")
    assert [line["samples"] for line in lines] == [6, 12, 18, 24, 30, 36, 40, 46]  # the last step of an epoch is short
    assert all(line["data_wait_seconds"] >= 0 and line["peak_memory_mb"] > 50 for line in lines)
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    (group,) = json.loads((output / "mars" / "worker_groups.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(output / "mars" / "model")
    assert (group["ranks"], group["parameters"]) == (2, model.num_parameters())
    page = (output / "report.html").read_text()
    assert report["page"] == str(output / "report.html")
    assert '<span class="state finished">finished</span>' in page
    assert page.count("<svg") == 8
    assert "null content" in page


def test_a_second_run_does_nothing_and_other_settings_are_refused(finished):
    shard, output, report = finished
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    assert run_training(recipe_of(*arguments(shard, output))) == report
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == before
    with pytest.raises(InputError, match=r"objective\.block_size: found 8; expected 4"):
        run_training(recipe_of(*arguments(shard, output), "objective.block_size=8"))


def test_a_killed_driver_resumes_with_the_curve_of_an_unbroken_run(finished, tmp_path):
    shard, unbroken, _ = finished
    output = tmp_path / "run"
    command = [sys.executable, str(ROOT / "jobs" / "train_mars.py"), *arguments(shard, output)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True)
    metrics = output / "mars" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3) and driver.poll() is None:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)
    was_running = driver.poll() is None
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert was_running, "the run ended before it could be killed"
    assert not (output / "report.json").exists()
    run_training(recipe_of(*arguments(shard, output)))
    assert losses(output, "mars") == pytest.approx(losses(unbroken, "mars"), abs=1e-4)


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory) -> Path:
    """Folders that cannot be trained, each for one reason."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(iter(["Say 7 twice."]), vocab_size=300, max_positions=128)
    scratch = FromScratch(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2
    )
    for name in ("no_tokenizer", "no_weights", "no_free_id", "recurrent", "short"):
        create_model_folder(scratch, tokenizer, folder / name, seed=0)
    for path in (folder / "no_tokenizer").glob("tokenizer*"):
        path.unlink()
    (folder / "no_weights" / "model.safetensors").unlink()
    for path in (folder / "no_free_id").glob("tokenizer*.json"):
        path.write_text(path.read_text().replace("<|mask|>", "plain").replace('"mask_token"', '"other_token"'))
    for name, key, value in (("recurrent", "model_type", "mamba"), ("short", "max_position_embeddings", 16)):
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {key: value}))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.train=nowhere/*.jsonl", "data.train"),
        ("data.train={tmp}/empty.jsonl", "empty.jsonl"),
        ("data.train={tmp}/broken.parquet", "broken.parquet"),
        ("data.response_column=reply", "answer, question"),
        ("model.path=nowhere", "nowhere"),
        ("model.path={models}/no_tokenizer", "no tokenizer"),
        ("model.path={models}/no_weights", "no weights"),
        ("model.path={models}/no_free_id", "model.add_mask_row"),
        ("model.path={models}/recurrent", "recurrent"),
        ("model.path={models}/short", "data.max_length"),
        ("objective.block_size=65", "objective.block_size"),
        ("training.num_step=3", "num_steps"),
        ("distributed.num_workers=64", "64 x 0.5 CPUs"),
        ("distributed.deepspeed.gradient_clipping=1", "training.max_grad_norm"),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_leaves_nothing(
    change, words, ray_session, model_folders, tmp_path, caplog
):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    output = tmp_path / "run"
    change = change.format(tmp=tmp_path, models=model_folders)
    assert train_mars.main([*arguments(write_shard(tmp_path), output), change]) == 2
    assert words in caplog.text
    assert not output.exists()


def test_a_refusal_costs_no_earlier_run(finished):
    shard, output, report = finished
    code = train_mars.main([*arguments(shard, output), "run.overwrite=true", "distributed.num_workers=64"])
    assert code == 2
    assert json.loads((output / "report.json").read_text()) == report


def test_too_many_bad_rows_stop_the_run_before_training(ray_session, tmp_path, caplog):
    shard = write_shard(tmp_path, num_rows=2)
    with shard.open("a") as file:
        file.write('{"question": "cut o\n')
    assert train_mars.main(arguments(shard, tmp_path / "run")) == 2
    assert "malformed JSON line" in caplog.text
    assert not (tmp_path / "run" / "sft").exists()


def test_a_folder_with_other_files_is_never_overwritten(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for overwrite in ("false", "true"):
        code = train_sft.main(
            [f"data.train={write_shard(tmp_path)}", "data.prompt_column=question", "data.response_column=answer"]
            + [f"run.output={precious}", f"run.overwrite={overwrite}"]
        )
        assert code == 2
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_dry_run_checks_and_writes_nothing(tmp_path, capsys):
    output = tmp_path / "run"
    assert train_mars.main([*arguments(write_shard(tmp_path), output), "--dry-run"]) == 0
    assert "block_size: 4" in capsys.readouterr().out
    assert not output.exists()


def test_a_continuation_refuses_shards_that_have_changed(finished, tmp_path):
    shard, output, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(output, copy)
    (copy / "report.json").unlink()
    before, times = shard.read_text(), shard.stat()
    shard.write_text(before.replace("Say 1 twice", "Say 2 twice"))
    try:
        with pytest.raises(InputError, match=r"data\.train: found files that have changed"):
            run_training(recipe_of(*arguments(shard, copy)))
    finally:
        shard.write_text(before)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run_training(recipe_of(*arguments(shard, copy))) is not None


def test_weights_that_no_worker_can_load_end_with_exit_code_2_and_their_name(ray_session, tmp_path, caplog):
    """Only loading shows it, so the workers find it: all of them, and trying again would change nothing."""
    model = tmp_path / "model"
    tokenizer = train_tokenizer(iter(["Say 7 twice."]), vocab_size=300, max_positions=128)
    scratch = FromScratch(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2
    )
    create_model_folder(scratch, tokenizer, model, seed=0)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    change = [f"model.path={model}", "sft=null"]
    assert train_mars.main([*arguments(write_shard(tmp_path), tmp_path / "run"), *change]) == 2
    assert "damaged weights" in caplog.text
    assert not (tmp_path / "run" / "mars" / "model").exists()
