"""What runs on every rank of a training stage: Ray Train gives rank, restart and storage; the loop is in `workers`."""

import json
import platform
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray.train
import torch
from ray.train.torch import get_device

from pipelines import model_folders, storage
from pipelines.checkpoint_store import CheckpointStore
from pipelines.held_out import HeldOutPlan, held_out_samples
from pipelines.metrics_board import BoardClient
from pipelines.sample_order import StreamPlan
from pipelines.sample_stream import rank_steps
from pipelines.stop_board import StopFlag
from workers.config import DistributedSettings, LoraSettings, OptimizationSettings
from workers.errors import InputError
from workers.models.export import export_folder
from workers.models.folder import MultiTokenSettings, load_tokenizer
from workers.models.loading import add_mask_row, choose_attention, init_mask_embedding, load_causal_lm
from workers.models.lora import add_adapters, merge_adapters
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.probe import check_two_streams
from workers.training.engine import build_engine
from workers.training.evaluation import HeldOut
from workers.training.loop import Metrics, train
from workers.training.weights import full_state_dict


@dataclass(frozen=True)
class StageJob:
    """All that a rank needs to know; made by the driver, the same on every rank.

    `start_model` is the folder to begin with, `final_model` the one to publish, both local or on S3; `settings` travel with the
    final model. `best_file` gets the metrics of the checkpoint that is published; None publishes the newest weights.
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
    lora: LoraSettings | None
    attention: Literal["auto", "dense", "flex"]
    seed: int
    log_every: int
    checkpoint_every: int
    held_out: HeldOutPlan | None
    best_file: str | None

    @property
    def trained_token_id(self) -> int | None:
        """The row of the embedding that is trained beside adapters: the placeholder's, where there are placeholders."""
        return self.objective.mask_token_id if self.objective.block_size > 1 else None


def run_stage(config: dict[str, Any]) -> None:
    """The training function of Ray Train. `config` has the `StageJob` as `job`, the `MetricsBoard` as `board`, and `stop_board`."""
    try:
        _run(config)
    except InputError as error:  # the driver says it, when trying again has not helped
        ray.get(config["board"].refuse.remote(error.args))
        raise


def _run(config: dict[str, Any]) -> None:
    job: StageJob = config["job"]
    board = BoardClient(config["board"])
    context = ray.train.get_context()
    rank = context.get_world_rank()
    if job.distributed.use_gpu:
        torch.cuda.set_device(get_device())  # what ranks of a node tell each other goes through this one
    else:
        torch.set_num_threads(1)  # ranks share the cores: more threads per rank only wait for each other
    torch.manual_seed(job.seed + rank)
    model, refusals = None, []
    try:
        job = replace(job, start_model=model_folders.fetch(job.start_model))
        model = _load_model(job)
    except InputError as error:
        refusals = [error.args]
    if _agree_on_refusal(refusals, config["board"]):
        return
    if rank == 0:
        board.describe(_facts(model, context.get_world_size()))
    module = LossModule(model, job.objective, job.optimization.head_chunk)
    engine = build_engine(module, job.optimization, job.distributed, job.plan.num_steps)
    checkpoints = CheckpointStore(engine)
    num_steps_done = _train(config, engine, checkpoints, board, rank, context.get_world_size())
    board.finish()
    if num_steps_done == job.plan.num_steps:
        _publish(job, engine, checkpoints, model)


def _agree_on_refusal(refusals: list[tuple[str, ...]], board: Any) -> bool:
    """Whether no rank can begin, which trying again would not change; says why.

    Raises:
        InputError: some ranks cannot, on a node without room, say. Raised on all of them, so that none waits for another.
    """
    everyone: list[list[tuple[str, ...]]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everyone, refusals)
    found = [refusal for of_rank in everyone for refusal in of_rank]
    if not found:
        return False
    if len(found) < len(everyone):
        raise InputError(*found[0])
    if torch.distributed.get_rank() == 0:
        ray.get(board.refuse.remote(found[0]))
    return True


def _train(
    config: dict[str, Any], engine: Any, checkpoints: CheckpointStore, board: BoardClient, rank: int, world_size: int
) -> int:
    """Goes on from the newest checkpoint; returns the number of finished steps, which is not all of them after a stop signal."""
    job: StageJob = config["job"]
    first_step = checkpoints.restore()
    if rank == 0:
        board.start(first_step)
    held_out = None
    if job.held_out is not None:
        held_out = HeldOut(
            held_out_samples(job.held_out, rank, world_size),
            engine,
            job.objective,
            job.optimization,
            every=job.held_out.every,
            at_checkpoints=job.best_file is not None,
        )

    def post(metrics: Metrics) -> None:
        if rank == 0:
            board.post(metrics.as_dict())

    return train(
        engine,
        job.objective,
        rank_steps(job.plan, rank, world_size, first_step),
        job.optimization,
        first_step=first_step,
        num_steps=job.plan.num_steps,
        log_every=job.log_every,
        checkpoint_every=job.checkpoint_every,
        on_metrics=post,
        on_checkpoint=checkpoints.save,
        held_out=held_out,
        should_stop=StopFlag(config["stop_board"]) if rank == 0 else lambda: False,
    )


def _publish(job: StageJob, engine: Any, checkpoints: CheckpointStore, model: Any) -> None:
    """Exports the newest weights or, if the job asks for it, those of the best checkpoint."""
    if job.best_file is not None:
        best = checkpoints.restore_best()
        storage.publish_bytes(job.best_file, json.dumps(best.as_dict()).encode())
    state = full_state_dict(engine, model, job.distributed.zero_stage)
    if state is not None:
        _export(job, state, model)


def _facts(model: Any, world_size: int) -> dict[str, Any]:
    """What the record of worker groups says of this one. To be called before ZeRO 3 splits the weights."""
    numbers = [(weights.numel(), weights.requires_grad) for weights in model.parameters()]
    device = get_device()
    return {
        "parameters": sum(number for number, _ in numbers),
        "trainable_parameters": sum(number for number, is_trainable in numbers if is_trainable),
        "ranks": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "host": platform.node(),
    }


def _start_model(job: StageJob) -> Any:
    """The model that the stage begins with, on the CPU, its placeholder ready."""
    model = load_causal_lm(
        job.start_model,
        dtype=torch.bfloat16 if job.distributed.use_gpu else torch.float32,
        attention=choose_attention(job.start_model, job.attention, on_gpu=job.distributed.use_gpu),
    )
    if job.add_mask_row:
        add_mask_row(model)
    if job.objective.block_size > 1 and not job.has_trained_placeholder:
        init_mask_embedding(model, job.objective.mask_token_id)
    return model


def _load_model(job: StageJob) -> Any:
    """The start model as it is trained: on its device, with adapters if so asked."""
    model = _start_model(job)
    if job.lora is not None:
        add_adapters(model, job.lora, trained_token_id=job.trained_token_id, seed=job.seed)
    model.to(get_device())
    check_two_streams(model)
    if job.optimization.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _export(job: StageJob, state: dict[str, torch.Tensor], model: Any) -> None:
    """Writes the trained model; adapters are merged into the start model first, so that its folder is an ordinary one."""
    if job.lora is not None:
        model = merge_adapters(state, _start_model(job), job.lora, trained_token_id=job.trained_token_id)
        state = model.state_dict()
    with model_folders.staged(job.final_model) as folder:
        export_folder(state, model, load_tokenizer(job.start_model), job.settings, folder)
