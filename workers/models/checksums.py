"""Checksums of tensors: sums in which every element counts by its place, so that lost, changed and misplaced values show."""

import torch
from torch import Tensor

_PERIOD = 997  # prime: partitions and rows begin at other weights
_CHUNK = _PERIOD << 14  # elements turned into float64 at once: 128 MiB


def checksum(tensor: Tensor, *, offset: int = 0) -> float:
    """The sum over i of `(1 + (offset + i) % 997 / 997) * x[i]`, in float64, over the flattened tensor.

    Checksums of the parts of a tensor, each with its offset, add up to that of the whole. Not finite where an element is not.
    """
    flat = tensor.detach().flatten()
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        places = torch.arange(offset + start, offset + start + part.numel(), device=flat.device) % _PERIOD
        total += (part * (1.0 + places / _PERIOD)).sum()
    return float(total)


def magnitude(tensor: Tensor) -> float:
    """The sum of absolute values in float64: what the rounding of a checksum is measured by."""
    return float(sum(part.double().abs().sum() for part in tensor.detach().flatten().split(_CHUNK)))


def agree(first: float, second: float, scale: float) -> bool:
    """Whether two checksums of the same values, summed in another order, are equal up to rounding.

    Args:
        scale: the `magnitude` of the tensor.
    """
    return abs(first - second) <= 1e-12 * scale + 1e-300
