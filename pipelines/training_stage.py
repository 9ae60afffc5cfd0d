"""One training stage: what its workers do, its run through Ray Train, and its part of the report."""

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from pipelines import model_folders, storage
from pipelines.checkpoint_store import mend_books
from pipelines.held_out import HeldOutPlan
from pipelines.metrics_board import GROUPS, METRICS, BoardSettings, read_groups
from pipelines.metrics_file import read_metrics
from pipelines.run_folder import RunFolder
from pipelines.sample_order import StreamPlan
from pipelines.sft_data import PreparedIndex
from pipelines.stage_summary import describe_pace, summarize_stage
from pipelines.stage_watch import StageWatch
from pipelines.stop_board import start_stop_board
from pipelines.stop_signals import StopSignals
from pipelines.trackers import tracker_settings
from pipelines.training_inputs import StartModel
from pipelines.training_page import TrainingPage, flat_config
from pipelines.training_worker import StageJob, run_stage
from workers.config import OptimizationSettings, TrainMarsRecipe, TrainSftRecipe
from workers.errors import InputError, Stopped
from workers.models.folder import MultiTokenSettings
from workers.objectives.mars import MarsObjective

BEST, CHECKPOINTS = "best.json", "checkpoints"
# How long the workers may take to hear of a stop: before that is said, and before it ends without them.
_PROMPT_SECONDS, _TOLD_SECONDS = 1.0, 30.0
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


def stage_job(
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
        attention=recipe.model.attention,
        seed=recipe.run.seed,
        log_every=recipe.run.log_every,
        checkpoint_every=recipe.run.checkpoint_every,
        held_out=HeldOutPlan(held_out, recipe.data.max_held_out, recipe.run.evaluate_every) if held_out else None,
        best_file=run.join(stage.name, BEST) if recipe.run.keep == "best" else None,
    )


def train_stage(
    recipe: TrainRecipe, run: RunFolder, job: StageJob, signals: StopSignals, page: TrainingPage
) -> dict[str, Any]:
    """Trains one stage, or finds it done, and returns its part of the report."""
    started = time.time()
    plan, folder = job.plan, run.join(job.settings.objective)
    page.add_stage(
        job.settings.objective,
        num_steps=plan.num_steps,
        epochs=plan.epochs,
        model=job.final_model,
    )
    if not model_folders.exists(job.final_model):
        _fit(recipe, run, job, signals, page)
    lines = read_metrics(storage.join(folder, METRICS))
    summary = summarize_stage(lines, read_groups(storage.join(folder, GROUPS)))
    if summary["held_out"] is not None:
        summary["held_out"] |= _published(job, plan.num_steps)
    return {
        "steps": plan.num_steps,
        "epochs": round(plan.epochs, 2),
        **summary,
        "seconds": round(time.time() - started, 1),
        "model": job.final_model,
        "last_metrics": lines[-1] if lines else None,
    }


def _published(job: StageJob, num_steps: int) -> dict[str, Any]:
    """Which weights the stage has published: the newest, or with `run.keep=best` those of the checkpoint with the lowest loss."""
    if job.best_file is None:
        return {"published_step": num_steps}
    best = json.loads(storage.read_bytes(job.best_file))
    return {"best_loss": best["held_out_loss"], "best_step": best["step"], "published_step": best["step"]}


def _fit(recipe: TrainRecipe, run: RunFolder, job: StageJob, signals: StopSignals, page: TrainingPage) -> None:
    """One stage through Ray Train, from its newest checkpoint if there is one."""
    distributed = recipe.distributed
    stage = job.settings.objective
    folder = run.join(stage)
    _logger.info("starting %d workers; on CPUs the first step takes about half a minute", distributed.num_workers)
    resources = {"CPU": distributed.cpus_per_worker} | ({"GPU": 1.0} if distributed.use_gpu else {})
    mend_books(storage.join(folder, CHECKPOINTS))
    stop_board = start_stop_board()
    run_config = RunConfig(
        name=CHECKPOINTS,
        **storage.run_storage(folder),
        failure_config=FailureConfig(max_failures=distributed.max_failures),
        checkpoint_config=CheckpointConfig(
            num_to_keep=recipe.run.num_to_keep,
            checkpoint_score_attribute="held_out_loss" if job.best_file is not None else None,
            checkpoint_score_order="min",
        ),
    )
    tracker = tracker_settings(recipe.run, run.join(), flat_config(recipe))
    board_settings = BoardSettings(stage, folder, recipe.run.tensorboard, tracker)
    pace = describe_pace(job.plan, distributed.num_workers)
    with StageWatch(board_settings, num_steps=job.plan.num_steps, pace=pace, make_page=page.refresh) as watch:
        trainer = TorchTrainer(
            run_stage,
            train_loop_config={"job": job, "board": watch.board, "stop_board": stop_board},
            torch_config=TorchConfig(backend="nccl" if distributed.use_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=distributed.num_workers, use_gpu=distributed.use_gpu, resources_per_worker=resources
            ),
            run_config=run_config,
        )

        failure: TrainingFailedError | None = None
        try:
            signals.run(trainer.fit, lambda name: _ask_to_stop(stop_board, stage, name))
        except TrainingFailedError as error:
            failure = error
        if failure is not None or not model_folders.exists(job.final_model):
            raise _why_without_model(job, watch, signals, failure)


def _ask_to_stop(stop_board: Any, stage: str, name: str) -> None:
    """Passes the signal `name` on to the workers.

    Raises:
        Stopped: they would not hear of it.
    """
    answer = stop_board.stop.remote()
    if not ray.wait([answer], timeout=_PROMPT_SECONDS)[0]:
        _logger.info("%s: waiting up to %g s for the workers of %s to be told", name, _TOLD_SECONDS, stage)
    try:
        has_begun = ray.get(answer, timeout=_TOLD_SECONDS)
    except RayError as error:
        raise Stopped(f"stopped by {name} at once: the workers of {stage} cannot be told") from error
    if not has_begun:
        raise Stopped(f"stopped by {name} before the workers of {stage} had begun")
    _logger.info("%s: a checkpoint after this step, then the end", name)


def _why_without_model(
    job: StageJob, watch: StageWatch, signals: StopSignals, failure: TrainingFailedError | None
) -> BaseException:
    """What ended a stage that has published no model."""
    refusal = watch.refusal()
    if refusal is not None:
        return InputError(*refusal)
    if failure is not None:
        return failure
    stage = job.settings.objective
    if signals.received is not None:
        return Stopped(f"{stage} stopped at step {watch.last_step()} by {signals.received}")
    return RuntimeError(f"{stage} ended without a model in {job.final_model}")
