"""The DeepSpeed engine: the only module of this room that imports deepspeed, and only when an engine is built."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workers.config import DistributedSettings, OptimizationSettings
from workers.training.schedule import learning_rate_factor


def deepspeed_config(
    optimization: OptimizationSettings, distributed: DistributedSettings, num_parameters: int
) -> dict[str, Any]:
    """DeepSpeed's own settings for one stage.

    Gradient accumulation is left to the caller (`managed_gradient_accumulation`): a step has as many micro-batches as its samples
    fill, and `step()` is its border.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optimization.max_grad_norm,
        "bf16": {"enabled": distributed.use_gpu},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": distributed.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(500_000_000, num_parameters),
            # Parameters below this stay whole on every rank: DeepSpeed's default would leave a small model unpartitioned.
            "stage3_param_persistence_threshold": min(100_000, num_parameters // 100),
        },
    }


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
    num_parameters = sum(parameter.numel() for parameter in parameters)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=parameters,
        lr_scheduler=lambda built: torch.optim.lr_scheduler.LambdaLR(
            built, lambda step: learning_rate_factor(step, num_steps, optimization)
        ),
        config=deepspeed_config(optimization, distributed, num_parameters),
        dist_init_required=False,
    )
    return engine


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


def full_state_dict(engine: Any, model: nn.Module, zero_stage: int) -> dict[str, torch.Tensor] | None:
    """Whole weights of the wrapped model, on the CPU; None on every rank but the first.

    All ranks must call it: under ZeRO-3 each parameter is gathered in turn.
    """
    is_first = dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, tensor in _named_tensors(model):
        with _gathered(tensor, zero_stage):
            expected = getattr(tensor, "ds_shape", tensor.shape)
            assert tensor.shape == expected, f"{name}: gathered {tuple(tensor.shape)} of {tuple(expected)}"
            if is_first:
                state[name] = tensor.detach().cpu().clone()
    return state if is_first else None


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, shared ones under each of their names, and the buffers that belong to the state."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _gathered(tensor: torch.Tensor, zero_stage: int) -> AbstractContextManager[Any]:
    """Under ZeRO-3, the whole of a parameter on every rank."""
    if zero_stage < 3 or not isinstance(tensor, nn.Parameter):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(tensor, modifier_rank=None)
    return context
