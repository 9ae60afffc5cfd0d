"""Training jobs: check, prepare the data, run the stages through Ray Train, report.

A run folder holds `run.json` (its settings), `data/` (prepared samples and rejected rows), one folder per stage (`checkpoints/`,
`metrics.jsonl`, `model/`) and `report.json`, which is written last. The same command goes on where a killed run stopped.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from pipelines import cluster, storage
from pipelines.manifest import identify_model
from pipelines.metrics_board import MetricsBoard, ProgressFollower, read_metrics
from pipelines.paths import resolve
from pipelines.progress import Progress
from pipelines.reports import environment, publish_report
from pipelines.run_folder import RunFolder
from pipelines.sample_stream import StreamPlan
from pipelines.sft_data import PreparedIndex, prepare_sft_data
from pipelines.sft_source import list_shards
from pipelines.training_inputs import StartModel, TrainingInputs
from pipelines.training_worker import StageJob, run_stage
from workers.config import OptimizationSettings, TrainMarsRecipe, TrainSftRecipe
from workers.errors import InputError
from workers.models.folder import MultiTokenSettings
from workers.objectives.mars import MarsObjective

METRICS = "metrics.jsonl"
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
    inputs = TrainingInputs(recipe.model, recipe.data, recipe.run.seed, run)
    inputs.check()
    if dry_run:
        return None
    started = time.time()
    _connect(recipe, run)
    run.take(overwrite=recipe.run.overwrite)
    start, index = _prepare(inputs, run)
    stage_reports = {}
    for stage in stages_of(recipe):
        stage_reports[stage.name] = _run_stage(recipe, run, stage, start, index)
        start = start.after(stage.name, run.join(stage.name, "model"))
    report = {
        "model": start.folder,
        "stages": stage_reports,
        "data": {"samples": index.num_rows, "rejected": index.num_rejected, "reasons": index.reasons},
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
    cluster.require_shared_folder("run.output", str(run.path))


def _prepare(inputs: TrainingInputs, run: RunFolder) -> tuple[StartModel, PreparedIndex]:
    """The start model and the prepared samples; refuses to go on with other ones than the run began with."""
    start, data = inputs.materialize()
    with Progress("data", len(list_shards(data.train)), "shards") as progress:
        index = prepare_sft_data(
            data,
            tokenizer_folder=start.folder,
            mask_token_id=start.mask_token_id,
            end_ids=start.end_ids,
            output=run.join("data"),
            report=lambda done, total: progress.update(done),
        )
    run.bind({"data.train": index.fingerprint, "model.path": identify_model(start.folder)})
    reasons = "".join(f", {count} {reason}" for reason, count in sorted(index.reasons.items()))
    _logger.info("data: %d samples, %d rejected rows%s", index.num_rows, index.num_rejected, reasons)
    return start, index


def _run_stage(
    recipe: TrainRecipe, run: RunFolder, stage: Stage, start: StartModel, index: PreparedIndex
) -> dict[str, Any]:
    """Trains one stage, or finds it done, and returns its part of the report."""
    started = time.time()
    optimization = stage.optimization
    plan = StreamPlan(
        index,
        seed=recipe.run.seed,
        samples_per_step=optimization.samples_per_step,
        shuffle_window=recipe.data.shuffle_window,
        num_epochs=optimization.num_epochs,
        max_steps=optimization.num_steps,
    )
    final_model = run.join(stage.name, "model")
    job = StageJob(
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
        plan=plan,
        start_model=start.folder,
        final_model=final_model,
        settings=MultiTokenSettings(
            mask_token_id=start.mask_token_id,
            block_size=stage.block_size,
            prompt_format=recipe.data.prompt_format,
            objective=stage.name,
        ),
        has_trained_placeholder=start.has_trained_placeholder,
        add_mask_row=start.adds_mask_row,
        attention=recipe.model.attention,
        seed=recipe.run.seed,
        log_every=recipe.run.log_every,
        checkpoint_every=recipe.run.checkpoint_every,
    )
    if not Path(final_model).exists():
        _fit(recipe, run.join(stage.name), job)
    lines = read_metrics(run.join(stage.name, METRICS))
    return {
        "steps": plan.num_steps,
        "epochs": round(plan.num_steps / plan.steps_per_epoch, 2),
        "first_loss": lines[0]["loss"],
        "final_loss": lines[-1]["loss"],
        "seconds": round(time.time() - started, 1),
        "model": final_model,
        "last_metrics": lines[-1],
    }


def _fit(recipe: TrainRecipe, folder: str, job: StageJob) -> None:
    """One stage through Ray Train, from its newest checkpoint in `folder` if there is one."""
    distributed = recipe.distributed
    _logger.info("starting %d workers; on CPUs the first step takes about half a minute", distributed.num_workers)
    resources = {"CPU": distributed.cpus_per_worker} | ({"GPU": 1.0} if distributed.use_gpu else {})
    board = MetricsBoard.remote(storage.join(folder, METRICS))  # type: ignore[attr-defined]
    trainer = TorchTrainer(
        run_stage,
        train_loop_config={"job": job, "board": board},
        torch_config=TorchConfig(backend="nccl" if distributed.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=distributed.num_workers, use_gpu=distributed.use_gpu, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name="checkpoints",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=distributed.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=recipe.run.num_to_keep),
        ),
    )
    with ProgressFollower(board, job.settings.objective, job.plan.num_steps):
        trainer.fit()
    refusal = ray.get(board.refusal.remote())
    if refusal is not None:
        raise InputError(*refusal)
