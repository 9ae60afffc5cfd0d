"""Training jobs: check, prepare the data, run the stages through Ray Train, report.

A run folder holds `run.json` (its settings), `data/` (prepared samples and rejected rows), one folder per stage (`checkpoints/`,
`metrics.jsonl`, `model/`) and `report.json`, which is written last. The same command goes on where a killed or stopped run was.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from pipelines import cluster, model_folders, storage
from pipelines.checkpoint_store import mend_books
from pipelines.held_out import HeldOutPlan
from pipelines.manifest import identify_model
from pipelines.metrics_board import MetricsBoard, ProgressFollower, read_metrics
from pipelines.mixture import describe_sources
from pipelines.paths import resolve
from pipelines.progress import Progress
from pipelines.reports import environment, publish_report
from pipelines.run_folder import RunFolder
from pipelines.run_lock import RunLock
from pipelines.sample_order import StreamPlan
from pipelines.sft_data import PreparedIndex, prepare_sft_data
from pipelines.sft_source import list_shards
from pipelines.stop_board import start_stop_board
from pipelines.stop_signals import StopSignals
from pipelines.training_inputs import StartModel, TrainingInputs
from pipelines.training_worker import StageJob, run_stage
from workers.config import OptimizationSettings, TrainMarsRecipe, TrainSftRecipe
from workers.errors import InputError, Stopped
from workers.models.folder import MultiTokenSettings
from workers.objectives.mars import MarsObjective
from workers.training.deepspeed_options import check_deepspeed_options

METRICS, BEST, CHECKPOINTS = "metrics.jsonl", "best.json", "checkpoints"
_CPUS_FOR_RAY_DATA = 0.5  # workers stream their samples through tasks of it
_logger = logging.getLogger(__name__)
TrainRecipe = TrainSftRecipe | TrainMarsRecipe


@dataclass(frozen=True)
class Stage:
    """One training stage: its folder name, its pace, and the cut and weights of its objective."""

    name: str
    optimization: OptimizationSettings
    block_size: int
    ar_weight: float
    mask_weight: float
    random_block_phase: bool


def stages_of(recipe: TrainRecipe) -> list[Stage]:
    """The stages that a recipe asks for, in order. AR SFT is the MARS objective with blocks of one and no mask loss."""

    def sft(optimization: OptimizationSettings) -> Stage:
        return Stage("sft", optimization, block_size=1, ar_weight=1.0, mask_weight=0.0, random_block_phase=False)

    if isinstance(recipe, TrainSftRecipe):
        return [sft(recipe.training)]
    objective = recipe.objective
    mars = Stage("mars", recipe.training, objective.block_size, objective.ar_weight, 1.0, objective.random_block_phase)
    return [sft(recipe.sft), mars] if recipe.sft else [mars]


def run_training(recipe: TrainRecipe, *, dry_run: bool = False) -> dict[str, Any] | None:
    """Trains all stages of a recipe and returns the report, which `report.json` in the run folder also holds.

    A dry run checks inputs, output and model, writes nothing, and returns None.

    Raises:
        InputError: for everything that the user can mend, before work starts where it can be known then.
    """
    run = RunFolder(resolve(recipe.run.output), recipe)
    run.check(overwrite=recipe.run.overwrite)
    finished = None if recipe.run.overwrite else run.finished_report()
    if finished is not None and not dry_run:
        _logger.info("the run in %s is finished; run.overwrite=true would repeat it", run.path)
        return finished
    check_deepspeed_options(recipe.distributed)
    inputs = TrainingInputs(recipe.model, recipe.data, recipe.run.seed, run, lora=recipe.lora)
    inputs.check()
    if dry_run:
        return None
    with StopSignals() as signals, RunLock(run.path):
        return _train(recipe, run, inputs, signals)


def _train(recipe: TrainRecipe, run: RunFolder, inputs: TrainingInputs, signals: StopSignals) -> dict[str, Any]:
    """The run itself, after the first checks; returns its report."""
    started = time.time()
    _connect(recipe, run)
    signals.install()  # Ray has taken SIGTERM for itself
    run.take(overwrite=recipe.run.overwrite)
    start, index, held_out = _prepare(inputs, run)
    stage_reports = {}
    for stage in stages_of(recipe):
        job = _stage_job(recipe, run, stage, start, index, held_out)
        stage_reports[stage.name] = _run_stage(recipe, run.join(stage.name), job, signals)
        start = start.after(stage.name, job.final_model)
    report = {
        "model": start.folder,
        "stages": stage_reports,
        "data": {
            "samples": index.num_rows,
            "rejected": index.num_rejected,
            "reasons": index.reasons,
            "sources": describe_sources(index),
        },
        "train_seconds": round(time.time() - started, 1),
        "exit_code": 0,
        "environment": environment(),
    }
    publish_report(run.report_path, report)
    return report


def _connect(recipe: TrainRecipe, run: RunFolder) -> None:
    """Joins the cluster and checks that it can hold the workers and that all of it sees the run folder."""
    cluster.connect()
    cluster.require_resources(
        "distributed.num_workers",
        num_workers=recipe.distributed.num_workers,
        cpus=recipe.distributed.cpus_per_worker,
        gpus=1.0 if recipe.distributed.use_gpu else 0.0,
        reserved_cpus=_CPUS_FOR_RAY_DATA,
    )
    cluster.require_shared_folder("run.output", run.path)


def _prepare(inputs: TrainingInputs, run: RunFolder) -> tuple[StartModel, PreparedIndex, PreparedIndex | None]:
    """The start model, the prepared samples and the held-out ones; refuses to go on with other ones than the run began with."""
    start, data = inputs.materialize()

    def prepare(title: str, paths: Sequence[str] | None, where: str, output: str) -> PreparedIndex:
        with Progress(title, len(list_shards(data.train if paths is None else paths, where)), "shards") as progress:
            index = prepare_sft_data(
                data,
                tokenizer_folder=start.folder,
                mask_token_id=start.mask_token_id,
                end_ids=start.end_ids,
                output=run.join(output),
                report=lambda done, total: progress.update(done),
                paths=paths,
                where=where,
            )
        reasons = "".join(f", {count} {reason}" for reason, count in sorted(index.reasons.items()))
        _logger.info("%s: %d samples, %d rejected rows%s", title, index.num_rows, index.num_rejected, reasons)
        return index

    index = prepare("data", None, "data.train", "data")
    if data.weights:
        for source in describe_sources(index):
            _logger.info("data: %(path)s: %(rows)d samples x %(weight)g, %(samples_per_epoch)g an epoch", source)
    held_out = prepare("held-out data", data.held_out, "data.held_out", "held_out_data") if data.held_out else None
    bound = {"data.train": index.fingerprint, "model.path": identify_model(start.folder)}
    run.bind(bound | ({"data.held_out": held_out.fingerprint} if held_out else {}))
    return start, index, held_out


def _stage_job(
    recipe: TrainRecipe,
    run: RunFolder,
    stage: Stage,
    start: StartModel,
    index: PreparedIndex,
    held_out: PreparedIndex | None,
) -> StageJob:
    """What the workers of a stage do."""
    optimization = stage.optimization
    return StageJob(
        objective=MarsObjective(
            block_size=stage.block_size,
            ar_weight=stage.ar_weight,
            mask_weight=stage.mask_weight,
            random_block_phase=stage.random_block_phase,
            mask_token_id=start.mask_token_id,
            seed=recipe.run.seed,
        ),
        optimization=optimization,
        distributed=recipe.distributed,
        plan=StreamPlan(
            index,
            seed=recipe.run.seed,
            samples_per_step=optimization.samples_per_step,
            shuffle_window=recipe.data.shuffle_window,
            num_epochs=optimization.num_epochs,
            max_steps=optimization.num_steps,
        ),
        start_model=start.folder,
        final_model=run.join(stage.name, "model"),
        settings=MultiTokenSettings(
            mask_token_id=start.mask_token_id,
            block_size=stage.block_size,
            prompt_format=recipe.data.prompt_format,
            objective=stage.name,
        ),
        has_trained_placeholder=start.has_trained_placeholder,
        add_mask_row=start.adds_mask_row,
        lora=recipe.lora,
        seed=recipe.run.seed,
        log_every=recipe.run.log_every,
        checkpoint_every=recipe.run.checkpoint_every,
        held_out=HeldOutPlan(held_out, recipe.data.max_held_out, recipe.run.evaluate_every) if held_out else None,
        best_file=run.join(stage.name, BEST) if recipe.run.keep == "best" else None,
    )


def _run_stage(recipe: TrainRecipe, folder: str, job: StageJob, signals: StopSignals) -> dict[str, Any]:
    """Trains one stage, or finds it done, and returns its part of the report."""
    started = time.time()
    if not model_folders.exists(job.final_model):
        _fit(recipe, folder, job, signals)
    lines = read_metrics(storage.join(folder, METRICS))
    best = json.loads(storage.read_bytes(job.best_file)) if job.best_file is not None else None
    return {
        "steps": job.plan.num_steps,
        "epochs": round(job.plan.epochs, 2),
        "first_loss": lines[0]["loss"],
        "final_loss": lines[-1]["loss"],
        "seconds": round(time.time() - started, 1),
        "model": job.final_model,
        "last_metrics": lines[-1],
        "held_out": _held_out_report(lines, best),
    }


def _held_out_report(lines: Sequence[dict[str, Any]], published: dict[str, Any] | None) -> dict[str, Any] | None:
    """First, last and lowest held-out loss of a stage; with `run.keep=best` the lowest one of a checkpoint, the published one."""
    evaluated = [line for line in lines if line["held_out_loss"] is not None]
    if not evaluated:
        return None
    best = published or min(evaluated, key=lambda line: line["held_out_loss"])
    return {
        "first_loss": evaluated[0]["held_out_loss"],
        "final_loss": evaluated[-1]["held_out_loss"],
        "best_loss": best["held_out_loss"],
        "best_step": best["step"],
        "published_step": published["step"] if published else lines[-1]["step"],
    }


def _fit(recipe: TrainRecipe, folder: str, job: StageJob, signals: StopSignals) -> None:
    """One stage through Ray Train, from its newest checkpoint in `folder` if there is one."""
    distributed = recipe.distributed
    _logger.info("starting %d workers; on CPUs the first step takes about half a minute", distributed.num_workers)
    resources = {"CPU": distributed.cpus_per_worker} | ({"GPU": 1.0} if distributed.use_gpu else {})
    mend_books(storage.join(folder, CHECKPOINTS))
    board = MetricsBoard.remote(storage.join(folder, METRICS))  # type: ignore[attr-defined]
    stop_board = start_stop_board()
    trainer = TorchTrainer(
        run_stage,
        train_loop_config={"job": job, "board": board, "stop_board": stop_board},
        torch_config=TorchConfig(backend="nccl" if distributed.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=distributed.num_workers, use_gpu=distributed.use_gpu, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=CHECKPOINTS,
            **storage.run_storage(folder),
            failure_config=FailureConfig(max_failures=distributed.max_failures),
            checkpoint_config=CheckpointConfig(
                num_to_keep=recipe.run.num_to_keep,
                checkpoint_score_attribute="held_out_loss" if job.best_file is not None else None,
                checkpoint_score_order="min",
            ),
        ),
    )

    def stop(name: str) -> None:
        if not ray.get(stop_board.stop.remote()):
            raise Stopped(f"stopped by {name} before the workers of {job.settings.objective} had begun")
        _logger.info("%s: a checkpoint after this step, then the end", name)

    with ProgressFollower(board, job.settings.objective, job.plan.num_steps):
        signals.run(trainer.fit, stop)
    refusal = ray.get(board.refusal.remote())
    if refusal is not None:
        raise InputError(*refusal)
    if signals.received is not None and not model_folders.exists(job.final_model):
        last = ray.get(board.last.remote())
        raise Stopped(f"{job.settings.objective} stopped at step {last['step']} by {signals.received}")
