"""Whether a written model folder holds the weights it should: its safetensors files are read back and compared."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from torch import Tensor, dtype
from transformers import PreTrainedModel

from workers.models.checksums import agree, checksum, magnitude


class ExportError(RuntimeError):
    """What is on disk is not what was to be written."""


class _Facts(NamedTuple):
    shape: tuple[int, ...]
    dtype: dtype
    checksum: float
    magnitude: float

    @classmethod
    def of(cls, tensor: Tensor) -> "_Facts":
        return cls(tuple(tensor.shape), tensor.dtype, checksum(tensor), magnitude(tensor))

    def is_close_to(self, other: "_Facts") -> bool:
        is_alike = self.shape == other.shape and self.dtype == other.dtype
        return is_alike and agree(self.checksum, other.checksum, other.magnitude)


def check_written_weights(state: Mapping[str, Tensor], model: PreTrainedModel, folder: Path) -> None:
    """Compares shapes, types and checksums of the weights in `folder` with those of `state`, one tensor at a time.

    Names that `transformers` changes on saving (fused experts, say) are compared by their sum of absolute values together.

    Args:
        state: the weights as they were handed over for writing, in the type in which they are stored.
        model: tells which names share one tensor, of which one is enough.

    Raises:
        ExportError: names the tensor.
    """
    written: dict[str, _Facts] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            written.update({name: _Facts.of(file.get_tensor(name)) for name in file.keys()})  # noqa: SIM118
    for name in sorted(written.keys() & state.keys()):
        expected = _Facts.of(state[name])
        if not written[name].is_close_to(expected):
            raise ExportError(f"{folder}: {name} is {written[name]} on disk; expected {expected}")
    shared = model.all_tied_weights_keys
    left_out = model._keys_to_ignore_on_save or ()
    missing = sorted(
        name
        for name in state.keys() - written.keys()
        if name not in shared and not any(re.search(pattern, name) for pattern in left_out)
    )
    renamed = sorted(written.keys() - state.keys())
    before = sum(magnitude(state[name]) for name in missing)
    after = sum(written[name].magnitude for name in renamed)
    if not agree(before, after, before + after) or bool(missing) != bool(renamed):
        raise ExportError(
            f"{folder}: without {', '.join(missing) or 'nothing'}, but with {', '.join(renamed) or 'nothing'}"
        )
    for name in shared.keys() - written.keys():
        _require_source(name, state, written, folder, shared)


def _require_source(
    name: str, state: Mapping[str, Tensor], written: Mapping[str, _Facts], folder: Path, shared: Mapping[str, str]
) -> None:
    """A shared tensor that is not on disk must be there under the name it is shared with."""
    source = shared[name]
    if name in state and source in written and not written[source].is_close_to(_Facts.of(state[name])):
        raise ExportError(f"{folder}: {name} is not equal to {source}, with which it shares its weights")
