"""Keys and values of all rows, allocated once: a slot for each row, a place for each position.

Rolling back is a change of a row's length, which the row itself holds: places behind it are overwritten by the next step and never
seen before. Attention reads the slots as views; only the beginning that a new prompt shares with another is ever copied.

Shapes: S slots, N query tokens of a step, P places of a slot, H key/value heads, D width of a head.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from workers.errors import InputError
from workers.models.attention_masks import AttentionMask

_GIB = 1 << 30


def run_backbone(
    backbone: nn.Module, token_ids_1N: Tensor, position_ids_1N: Tensor, mask: AttentionMask, cache: Cache, **others: Any
) -> Tensor:
    """One forward of the model without its head: hidden states (1, N, width) after the final norm.

    The only place that knows by which keyword a model takes its cache: transformers 5.24 renamed it.
    """
    outputs = backbone(
        input_ids=token_ids_1N,
        position_ids=position_ids_1N,
        attention_mask=mask,
        use_cache=True,
        **{_cache_keyword(type(backbone).forward): cache},
        **others,
    )
    return outputs.last_hidden_state


@functools.cache
def _cache_keyword(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


@dataclass(frozen=True)
class LayerShape:
    """What one token of one layer holds."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_heads * (self.key_width + self.value_width) * self.dtype.itemsize


class _ShapeProbe(Cache):
    """A cache that only looks at what the layers put into it, so that no configuration has to be interpreted."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        num_heads, _, key_width = key_states.shape[1:]
        self.shapes[layer_idx] = LayerShape(
            num_heads, key_width, value_states.shape[-1], key_states.dtype, key_states.device
        )
        return key_states, value_states


def probe_layers(backbone: nn.Module, mask: AttentionMask, device: torch.device) -> list[LayerShape]:
    """The shape of every layer's keys and values, from a forward of one token."""
    probe = _ShapeProbe()
    zero_11 = torch.zeros((1, 1), dtype=torch.int64, device=device)
    run_backbone(backbone, zero_11, zero_11, mask, probe)
    assert sorted(probe.shapes) == list(range(len(probe.shapes)))
    return [probe.shapes[layer] for layer in range(len(probe.shapes))]


class SlotCache(Cache):
    """The slots of all layers, in the form that the model's own attention calls.

    Before each forward `prepare` says where the keys and values of the step go.

    Args:
        shapes: of the layers.
        num_slots: rows at the same time.
        max_length: tokens of a row.
        num_spare: places of a slot beyond, for query tokens of a step.

    Raises:
        InputError: the slots need more memory than is free.
    """

    def __init__(self, shapes: list[LayerShape], num_slots: int, max_length: int, num_spare: int = 0) -> None:
        super().__init__(layers=[])
        _check_memory(shapes, num_slots, max_length, num_spare)
        num_places = max_length + num_spare
        # One place more: what must not be kept is written there.
        self.trash_place = num_places
        # Zeros, since a place that no query sees still takes part in a product with 0.
        self._keys = [_zeros(shape, num_slots, num_places + 1, shape.key_width) for shape in shapes]
        self._values = [_zeros(shape, num_slots, num_places + 1, shape.value_width) for shape in shapes]
        self._places: tuple[Tensor, Tensor] | None = None

    def prepare(self, slot_N: Tensor, place_N: Tensor) -> None:
        """Says in which slots and places the query tokens of the next forward stand."""
        self._places = (slot_N, place_N)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the step's keys and values (1, H, N, D); returns all slots of the layer (S, H, P, D)."""
        assert self._places is not None
        keys_SHPD, values_SHPD = self._keys[layer_idx], self._values[layer_idx]
        keys_SHPD.transpose(1, 2)[self._places] = key_states[0].transpose(0, 1)
        values_SHPD.transpose(1, 2)[self._places] = value_states[0].transpose(0, 1)
        return keys_SHPD, values_SHPD

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first places of one slot to another."""
        for states_SHPD in (*self._keys, *self._values):
            states_SHPD[target, :, :num_tokens] = states_SHPD[source, :, :num_tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows have lengths of their own; models that are given positions and masks do not need this one."""
        return 0


def _zeros(shape: LayerShape, num_slots: int, num_places: int, width: int) -> Tensor:
    return torch.zeros(num_slots, shape.num_heads, num_places, width, dtype=shape.dtype, device=shape.device)


def slot_length(max_length: int | None, config: PreTrainedConfig) -> int:
    """Places of a slot: `max_length`, or as many positions as the model has.

    Raises:
        InputError: more than the model has, or no limit at all; or so many that a row's text would depend on its neighbours.
    """
    config = config.get_text_config()
    num_positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        _check_longrope(max_length or num_positions, rope.get("original_max_position_embeddings"))
    if max_length is None:
        if num_positions is None:
            raise InputError("decoding.max_length", "null", "a number", "The model names no longest sequence.")
        return num_positions
    if num_positions is not None and max_length > num_positions:
        raise InputError("decoding.max_length", str(max_length), f"at most {num_positions}, the model's positions")
    return max_length


def _check_longrope(length: int | None, original: int | None) -> None:
    """Such models take other frequencies for all rows of a step as soon as one of them is longer than the original length."""
    if length is None or original is None or length > original:
        raise InputError(
            "decoding.max_length",
            f"{length}, of a model with longrope positions",
            f"at most {original}, its original length",
            "Beyond it, the text of a row would depend on the other rows of its batch.",
        )


def _check_memory(shapes: list[LayerShape], num_slots: int, max_length: int, num_spare: int) -> None:
    token_bytes = sum(shape.num_bytes for shape in shapes)
    num_places = max_length + num_spare
    slot_bytes = token_bytes * (num_places + 1)
    free_bytes = _free_memory(shapes[0].device)
    if num_slots * slot_bytes <= free_bytes:
        return
    fits = f"{free_bytes // slot_bytes} slots of this length would fit"
    longest = free_bytes // (token_bytes * num_slots) - 1 - num_spare
    if longest > 1:
        fits += f", or a max_length of {longest} with this number of slots"
    raise InputError(
        "decoding.num_slots, decoding.max_length",
        f"{num_slots} slots of {num_places} tokens at {token_bytes} bytes a token: {num_slots * slot_bytes / _GIB:.2f} GiB",
        f"at most {free_bytes / _GIB:.2f} GiB, which is free on {shapes[0].device}",
        f"{fits}.",
    )


def _free_memory(device: torch.device) -> int:
    """Bytes of the device that slots may take: nine tenths of what is free, for a step needs some too."""
    return int(0.9 * _unused_memory(device))


def _unused_memory(device: torch.device) -> int:
    if device.type == "cuda":
        # Memory that torch holds but does not use counts as free.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
