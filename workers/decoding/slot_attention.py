"""The attention of every layer in a decoding step: packed queries against the slots of the cache.

transformers calls it by name through its attention interface; the step comes along as a keyword, and the mask that a layer is
given is only a sign of its layer type.

Shapes: N query tokens, H query heads, K key/value heads, G = H / K, D width of a head, S slots, P places, R slots of a group, Q
lanes of a group, T places that are read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from workers.decoding.packed_step import Group, PackedStep
from workers.errors import InputError

_NAME = "marsray_slots"


class StepContext:
    """A step, and the sign by which its layers say of which type they are."""

    def __init__(self, step: PackedStep, layer_types: Mapping[str, object], device: torch.device) -> None:
        self.step = step
        self.signs = {name: torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device) for name in layer_types}

    def layer_type(self, sign: Tensor) -> str:
        """The layer type that a sign stands for."""
        return next(name for name, each in self.signs.items() if each is sign)


@contextmanager
def slot_attention_in(config: PreTrainedConfig) -> Iterator[None]:
    """Runs a model's layers with this attention, and gives the model its own back."""
    AttentionInterface.register(_NAME, _attend)
    earlier = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = earlier


def _attend(
    module: nn.Module,
    query_1HND: Tensor,
    keys_SKPD: Tensor,
    values_SKPD: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    decoding_step: StepContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Signature and result (1, N, H, D) of the attention interface."""
    assert decoding_step is not None
    for name in ("s_aux", "position_bias", "head_mask"):
        if others.get(name) is not None:
            raise InputError("model", f"attention with {name}", "attention by queries, keys and values alone")
    layer_type = decoding_step.layer_type(attention_mask)
    step = decoding_step.step
    query_NHD = query_1HND[0].transpose(0, 1)
    outputs = []
    for group in step.groups:
        keys_RKTD, values_RKTD = (states[group.slots, :, : group.num_places] for states in (keys_SKPD, values_SKPD))
        # One group without padding has its tokens in order.
        is_whole = step.is_in_order and len(step.groups) == 1
        group_NHD = query_NHD if is_whole else query_NHD[group.index_RQ.flatten()]
        outputs.append(_attend_group(group, layer_type, group_NHD, keys_RKTD, values_RKTD, scaling, softcap))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (flat if step.is_in_order else flat[step.output_N])[None], None


def _attend_group(
    group: Group,
    layer_type: str,
    query_NHD: Tensor,
    keys_RKTD: Tensor,
    values_RKTD: Tensor,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """The results (R * Q, H, D) of a group's queries, lanes behind lanes both."""
    num_rows, num_lanes = group.index_RQ.shape
    num_key_heads = keys_RKTD.shape[1]
    num_heads, width = query_NHD.shape[1:]
    num_shared = num_heads // num_key_heads
    # The heads that share keys become further queries of one head, so keys and values are never repeated in memory.
    query = query_NHD.reshape(num_rows, num_lanes, num_key_heads, num_shared, width)
    query = query.permute(0, 2, 3, 1, 4).reshape(num_rows, num_key_heads, num_shared * num_lanes, width)
    mask = group.folded_mask(layer_type, num_shared)
    if softcap is None:
        result = scaled_dot_product_attention(query, keys_RKTD, values_RKTD, attn_mask=mask, scale=scaling)
    else:
        result = _capped_attention(query, keys_RKTD, values_RKTD, mask, scaling or width**-0.5, softcap)
    result = result.view(num_rows, num_key_heads, num_shared, num_lanes, -1).permute(0, 3, 1, 2, 4)
    return result.reshape(num_rows * num_lanes, num_heads, -1)


def _capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float
) -> Tensor:
    """Attention whose scores are squeezed between -softcap and softcap (Gemma 2)."""
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scaling / softcap)) * softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    return weights @ values
