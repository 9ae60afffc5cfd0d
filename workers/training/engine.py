"""The DeepSpeed engine: how it is built, and what its ranks agree on before a step."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workers.config import DistributedSettings, OptimizationSettings
from workers.training.deepspeed_options import deepspeed_config
from workers.training.schedule import learning_rate_factor


def build_engine(
    module: nn.Module, optimization: OptimizationSettings, distributed: DistributedSettings, num_steps: int
) -> Any:
    """Wraps a loss module for ZeRO training with AdamW and the stage's schedule.

    Needs an initialised process group. Parameters with `requires_grad=False` stay out of the optimizer.
    """
    import deepspeed

    # On CPUs DeepSpeed would compile a shared-memory all-reduce: a minute at the first start, and a C++ compiler needed. gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=optimization.learning_rate,
        betas=optimization.betas,
        weight_decay=optimization.weight_decay,
    )
    config = deepspeed_config(optimization, distributed, sum(parameter.numel() for parameter in parameters))
    if distributed.zero_stage == 0 and not distributed.use_gpu:
        # Without ZeRO and half precision DeepSpeed clips and forgets the norm; so it is done here.
        config["gradient_clipping"] = 0.0
        optimizer.register_step_pre_hook(lambda built, *_: _clip(built, parameters, optimization.max_grad_norm))
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=parameters,
        lr_scheduler=lambda built: torch.optim.lr_scheduler.LambdaLR(
            built, lambda step: learning_rate_factor(step, num_steps, optimization)
        ),
        config=config,
        dist_init_required=False,
    )
    return engine


def _clip(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float) -> None:
    """Clips the gradients, equal on all ranks, and leaves their norm where `get_global_grad_norm` of the engine finds it."""
    optimizer._global_grad_norm = nn.utils.clip_grad_norm_(parameters, max_norm)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StepShape:
    """What all ranks must agree on before a step: the same passes everywhere, and one denominator."""

    num_micro_batches: int
    num_chunks: int
    num_response_tokens: int
    is_last: bool


def agree_on_step(
    num_micro_batches: int,
    num_chunks: int,
    num_response_tokens: int,
    device: torch.device,
    *,
    should_stop: bool = False,
) -> StepShape:
    """All-reduces one rank's needs to those of the whole step: maxima of the passes, the sum of the supervised tokens.

    Without it a rank with fewer rows would miss a collective, and the run would hang. The step is the last one for all ranks when
    one of them has been told to stop.
    """
    needs = [num_micro_batches, num_chunks, num_response_tokens, int(should_stop)]
    mine = torch.tensor(needs, dtype=torch.int64, device=device)
    world = torch.empty(dist.get_world_size() * len(needs), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(world, mine)
    everyone = world.view(-1, len(needs)).tolist()  # sync: one small copy to the host per step
    micro_batches, chunks, tokens, stops = zip(*everyone, strict=True)
    return StepShape(max(micro_batches), max(chunks), sum(tokens), any(stops))
