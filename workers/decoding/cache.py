"""Keys and values of all rows, allocated once: a slot for each row, a place for each position.

Rolling back is a change of a row's length, which the row itself holds: places behind it are overwritten by the next step and never
seen before. Reading the slots 0..n-1 is a view. The only copy is one row's move into a hole when the queue has run dry.

Shapes: S slots, B rows, Q query tokens of a row, T places, H key/value heads, D width of a head.
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
    backbone: nn.Module, token_ids_BQ: Tensor, position_ids_BQ: Tensor, mask: AttentionMask, cache: Cache | None
) -> Tensor:
    """One forward of the model without its head: hidden states (B, Q, width) after the final norm.

    The only place that knows by which keyword a model takes its cache: transformers 5.24 renamed it.
    """
    outputs = backbone(
        input_ids=token_ids_BQ,
        position_ids=position_ids_BQ,
        attention_mask=mask,
        use_cache=cache is not None,
        **{_cache_keyword(type(backbone).forward): cache},
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


class RaggedCache(Cache):
    """The slots of all layers, in the form that the model's own attention calls.

    Before each forward `prepare` says where the step's keys go and which slots are read.

    Raises:
        InputError: the slots need more memory than is free.
    """

    def __init__(self, shapes: list[LayerShape], num_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        _check_memory(shapes, num_slots, max_length)
        # One place more than needed: padding is written there.
        self.trash_place = max_length
        num_places = max_length + 1
        # Zeros, since a place that no query sees still takes part in a product with 0.
        self._keys = [
            torch.zeros(num_slots, shape.num_heads, num_places, shape.key_width, dtype=shape.dtype, device=shape.device)
            for shape in shapes
        ]
        self._values = [
            torch.zeros(
                num_slots, shape.num_heads, num_places, shape.value_width, dtype=shape.dtype, device=shape.device
            )
            for shape in shapes
        ]
        self._places: tuple[Tensor, Tensor] | None = None
        self._num_read: int | None = None

    def prepare(self, slot_B: Tensor, place_BQ: Tensor, num_read: int | None) -> None:
        """Sets up the next forward.

        Args:
            slot_B: the rows' slots.
            place_BQ: where the query tokens go; the trash place for padding.
            num_read: places that are read, in the slots 0..B-1, which must be the rows' slots; None for new rows, which see nothing
                but their own query tokens.
        """
        self._places = (slot_B[:, None], place_BQ)
        self._num_read = num_read

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the step's keys and values (B, H, Q, D); returns those that its queries may look at (B, H, T, D)."""
        assert self._places is not None
        keys_SHTD, values_SHTD = self._keys[layer_idx], self._values[layer_idx]
        keys_SHTD.transpose(1, 2)[self._places] = key_states.transpose(1, 2)
        values_SHTD.transpose(1, 2)[self._places] = value_states.transpose(1, 2)
        if self._num_read is None:
            return key_states, value_states
        num_rows = key_states.shape[0]
        return keys_SHTD[:num_rows, :, : self._num_read], values_SHTD[:num_rows, :, : self._num_read]

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` places of one slot to another."""
        for layers in (self._keys, self._values):
            for states_SHTD in layers:
                states_SHTD[target, :, :num_tokens] = states_SHTD[source, :, :num_tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows have lengths of their own; models that are given positions and masks do not need this one."""
        return 0


def slot_length(max_length: int | None, config: PreTrainedConfig) -> int:
    """Places of a slot: `max_length`, or as many positions as the model has.

    Raises:
        InputError: more than the model has, or no limit at all.
    """
    num_positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_length is None:
        if num_positions is None:
            raise InputError("decoding.max_length", "null", "a number", "The model names no longest sequence.")
        return num_positions
    if num_positions is not None and max_length > num_positions:
        raise InputError("decoding.max_length", str(max_length), f"at most {num_positions}, the model's positions")
    return max_length


def _check_memory(shapes: list[LayerShape], num_slots: int, max_length: int) -> None:
    token_bytes = sum(shape.num_bytes for shape in shapes)
    slot_bytes = token_bytes * (max_length + 1)
    free_bytes = _free_memory(shapes[0].device)
    if num_slots * slot_bytes <= free_bytes:
        return
    raise InputError(
        "decoding.num_slots, decoding.max_length",
        f"{num_slots} slots of {max_length} tokens at {token_bytes} bytes a token: {num_slots * slot_bytes / _GIB:.2f} GiB",
        f"at most {free_bytes / _GIB:.2f} GiB, which is free on {shapes[0].device}",
        f"{free_bytes // slot_bytes} slots of this length would fit, or {max(free_bytes // (token_bytes * num_slots) - 1, 0)} "
        f"tokens with this number of slots.",
    )


def _free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device."""
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
