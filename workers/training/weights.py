"""Whole weights out of an engine: gathered where ranks hold parts of them, and checked tensor by tensor."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.errors import InputError
from workers.models.checksums import agree, checksum, magnitude


class WeightError(RuntimeError):
    """Gathered weights are not those that the ranks hold."""


def full_state_dict(engine: Any, model: nn.Module, zero_stage: int) -> dict[str, Tensor] | None:
    """Whole weights of the wrapped model, on the CPU; None on every rank but the first.

    All ranks must call it: under ZeRO-3 each parameter is gathered in turn, and its checksum must be the sum of the checksums
    of all partitions; in other stages the ranks must agree on each.

    Raises:
        InputError: on every rank, a weight is not a finite number; names the tensor.
        WeightError: on every rank, a tensor has another shape or other values than its parts.
    """
    is_first = dist.get_rank() == 0
    tensors = list(_named_tensors(model))
    parts = torch.tensor([_part_checksum(tensor) for _, tensor in tensors], dtype=torch.float64, device=engine.device)
    wholes, scales = torch.zeros_like(parts), torch.zeros_like(parts)
    state: dict[str, Tensor] = {}
    for index, (name, tensor) in enumerate(tensors):
        with _gathered(tensor, zero_stage):
            expected = getattr(tensor, "ds_shape", tensor.shape)
            if tensor.shape != expected:
                raise WeightError(f"{name}: gathered {tuple(tensor.shape)} of {tuple(expected)}")
            wholes[index] = checksum(tensor) if _is_partitioned(tensor) else parts[index]
            scales[index] = magnitude(tensor)
            if is_first:
                state[name] = tensor.detach().cpu().clone()
    names, are_partitioned = [name for name, _ in tensors], [_is_partitioned(tensor) for _, tensor in tensors]
    _compare(names, are_partitioned, parts, wholes, scales)
    return state if is_first else None


def _compare(names: list[str], are_partitioned: list[bool], parts: Tensor, wholes: Tensor, scales: Tensor) -> None:
    """Compares on every rank what all ranks hold (N parts) with what each has gathered (N wholes)."""
    world = [torch.empty_like(torch.stack([parts, wholes, scales])) for _ in range(dist.get_world_size())]
    dist.all_gather(world, torch.stack([parts, wholes, scales]))
    everyone_R3N = torch.stack(world).cpu()
    for index, name in enumerate(names):
        parts_R, wholes_R, scales_R = everyone_R3N[:, :, index].unbind(dim=1)
        if not everyone_R3N[:, :, index].isfinite().all():
            raise InputError(
                f"the trained weights, {name}",
                "a number that is not finite",
                "finite weights",
                "The model has diverged: train again with a lower learning rate or a lower max_grad_norm.",
            )
        held = [float(parts_R.sum())] if are_partitioned[index] else parts_R.tolist()
        scale = float(scales_R.max())
        for whole in wholes_R.tolist():
            if not all(agree(whole, part, scale) for part in held):
                raise WeightError(f"{name}: gathered weights with checksum {whole:.9g}; the ranks hold {held}")


def _part_checksum(tensor: Tensor) -> float:
    """Of this rank's partition, without its padding, when the tensor is spread over ranks; otherwise of all of it."""
    if not _is_partitioned(tensor):
        return checksum(tensor)
    partition: Any = tensor.ds_tensor  # type: ignore[attr-defined]
    start = dist.get_rank() * partition.ds_numel
    return checksum(partition.flatten()[: max(0, tensor.ds_numel - start)], offset=start)  # type: ignore[attr-defined]


def _is_partitioned(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_tensor")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, shared ones under each of their names, and the buffers that belong to the state."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _gathered(tensor: Tensor, zero_stage: int) -> AbstractContextManager[Any]:
    """Under ZeRO-3, the whole of a parameter on every rank."""
    if zero_stage < 3 or not isinstance(tensor, nn.Parameter):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(tensor, modifier_rank=None)
    return context
