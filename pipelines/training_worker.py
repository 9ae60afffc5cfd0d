"""What runs on every rank of a training stage: Ray Train gives rank, restart and storage; the loop is in `workers`."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray.train
import torch
from ray.train.torch import get_device

from pipelines.sample_stream import StreamPlan, rank_steps
from workers.config import DistributedSettings, OptimizationSettings
from workers.errors import InputError
from workers.models.export import export_folder
from workers.models.folder import MultiTokenSettings, load_tokenizer
from workers.models.loading import add_mask_row, choose_attention, init_mask_embedding, load_causal_lm
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.probe import check_two_streams
from workers.training.checkpoint import load_training_state, save_training_state
from workers.training.engine import build_engine, full_state_dict
from workers.training.loop import Metrics, train


@dataclass(frozen=True)
class StageJob:
    """All that a rank needs to know; made by the driver, the same on every rank.

    `start_model` is the folder to begin with, `final_model` the one to publish; `settings` travel with the final model.
    """

    objective: MarsObjective
    optimization: OptimizationSettings
    distributed: DistributedSettings
    plan: StreamPlan
    start_model: str
    final_model: str
    settings: MultiTokenSettings
    has_trained_placeholder: bool
    add_mask_row: bool
    attention: Literal["auto", "dense", "flex"]
    seed: int
    log_every: int
    checkpoint_every: int


def run_stage(config: dict[str, Any]) -> None:
    """The training function of Ray Train. `config` holds the `StageJob` under `job` and the `MetricsBoard` under `board`."""
    job: StageJob = config["job"]
    board = config["board"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    if not job.distributed.use_gpu:
        torch.set_num_threads(1)  # ranks share the cores: more threads per rank only wait for each other
    torch.manual_seed(job.seed + rank)
    try:
        model = _load_model(job)
    except InputError as error:  # on every rank alike; raised, it would count as a failure and be tried again
        if rank == 0:
            ray.get(board.refuse.remote(error.args))
        return
    module = LossModule(model, job.objective, job.optimization.head_chunk)
    engine = build_engine(module, job.optimization, job.distributed, job.plan.num_steps)
    first_step = _restore(engine)
    if rank == 0:
        ray.get(board.restart.remote(first_step))

    def post(metrics: Metrics) -> None:
        if rank == 0:
            ray.get(board.post.remote(metrics.as_dict()))

    train(
        engine,
        job.objective,
        rank_steps(job.plan, rank, world_size, first_step),
        job.optimization,
        first_step=first_step,
        num_steps=job.plan.num_steps,
        log_every=job.log_every,
        checkpoint_every=job.checkpoint_every,
        on_metrics=post,
        on_checkpoint=lambda done, metrics: _save(engine, done, metrics),
    )
    state = full_state_dict(engine, model, job.distributed.zero_stage)
    if state is not None:
        export_folder(state, model, load_tokenizer(job.start_model), job.settings, job.final_model)


def _load_model(job: StageJob) -> Any:
    model = load_causal_lm(
        job.start_model,
        dtype=torch.bfloat16 if job.distributed.use_gpu else torch.float32,
        attention=choose_attention(job.start_model, job.attention, on_gpu=job.distributed.use_gpu),
    )
    if job.add_mask_row:
        add_mask_row(model)
    if job.objective.block_size > 1 and not job.has_trained_placeholder:
        init_mask_embedding(model, job.objective.mask_token_id)
    model.to(get_device())
    if job.objective.block_size > 1:
        check_two_streams(model)
    if job.optimization.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _restore(engine: Any) -> int:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return load_training_state(engine, Path(folder))


def _save(engine: Any, num_steps_done: int, metrics: Metrics) -> None:
    """Every rank writes its share; Ray Train uploads them to one checkpoint and counts it once all have arrived."""
    with tempfile.TemporaryDirectory(prefix="marsray-checkpoint-") as folder:
        save_training_state(engine, Path(folder), num_steps_done=num_steps_done)
        torch.distributed.barrier()
        ray.train.report(
            metrics.as_dict(),
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"step-{num_steps_done:08d}",
        )
