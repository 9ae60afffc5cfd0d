"""The model as the engine uses it: packed steps over the slots of a cache, and logits of chosen positions.

Shapes: N query tokens of a step, D model width, V vocabulary; leading dimensions of logits are free.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.decoding.cache import LayerShape, SlotCache, probe_layers, run_backbone
from workers.decoding.packed_step import PackedStep, SlotShape, pack_step
from workers.decoding.scheduler import Copy
from workers.decoding.slot_attention import StepContext, slot_attention_in
from workers.decoding.step_groups import PlacedQuery
from workers.decoding.strategies.mars import RowQuery
from workers.errors import InputError
from workers.models.attention_masks import attention_windows, pack_by_layer_type, pack_masks, takes_additive_masks
from workers.models.loading import backbone_and_head

_CHECKED_TOKENS = (5, 3)
_GPU_MULTIPLES = (16, 256)  # of tokens of a step, and of places that are read
# Sums in another order differ by a millionth of the largest logit in float32; a wrong mask or scale by far more than this.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_CONTEXT_OF_MEASUREMENTS = 128
_REPEATS = 3


class DecoderModel:
    """A causal language model with a slot of cache for each row. `seconds` counts the time spent in it.

    Args:
        model: in evaluation mode.
        num_slots: rows at the same time.
        max_length: positions of a row.
        num_spare: query tokens of a row in one step that may stand beyond `max_length`.

    Raises:
        InputError: a cache larger than the free memory, or attention that is not that of queries, keys and values alone.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_length: int, num_spare: int) -> None:
        self._backbone, self._head, self._logit_transform = backbone_and_head(model)
        self._windows = attention_windows(model.config)
        self.device = model.device
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self._max_length = max_length
        self._cache = SlotCache(self._probe(model), num_slots, max_length, num_spare)
        multiples = _GPU_MULTIPLES if self.device.type == "cuda" else (1, 1)
        self.slot_shape = SlotShape(max_length, max_length + num_spare + 1, *multiples)
        self.seconds = 0.0

    def _probe(self, model: PreTrainedModel) -> list[LayerShape]:
        sign = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        masks = pack_masks(
            dict.fromkeys(self._windows, sign), is_additive=takes_additive_masks(model.config), dtype=model.dtype
        )
        return probe_layers(self._backbone, masks, self.device)

    def pack(self, rows: Sequence[PlacedQuery]) -> PackedStep:
        """Lays out a step; see `pack_step`."""
        return pack_step(rows, self._windows, shape=self.slot_shape, device=self.device)

    @torch.inference_mode()
    def check(self, model: PreTrainedModel) -> None:
        """Compares the logits of two packed steps with those of the model as it is.

        Raises:
            InputError: they differ, or the model's layers cannot run packed steps.
        """
        num_tokens = min(sum(_CHECKED_TOKENS), self._max_length)
        token_ids = [7919 * place % self.vocab_size for place in range(num_tokens)]
        expected_NV = model(torch.tensor([token_ids], device=self.device), use_cache=False).logits[0].float()
        logits, start = [], 0
        try:
            for end in (min(_CHECKED_TOKENS[0], num_tokens - 1), num_tokens):
                query = RowQuery(token_ids[start:end], end - start)
                logits.append(self.logits(self.forward(self.pack([PlacedQuery(0, start, query)]))))
                start = end
        except (RuntimeError, TypeError, AttributeError) as error:
            found = f"{model.config.model_type}, whose layers fail with {type(error).__name__}: {error}"
            raise InputError("model type", found, "layers that use the attention interface of transformers") from error
        difference = float((torch.cat(logits) - expected_NV).abs().max() / expected_NV.abs().max().clamp(min=1))
        if not difference <= _TOLERANCES[model.dtype]:
            found = (
                f"{model.config.model_type}, whose logits differ by {difference:.1e} of the largest one when decoded"
            )
            raise InputError("model type", found, f"at most {_TOLERANCES[model.dtype]:.0e}")

    def copy_prefixes(self, copies: Sequence[Copy]) -> None:
        """Gives rows the keys and values that other rows have computed for the same tokens."""
        for copy in copies:
            self._cache.copy(copy.source, copy.target, copy.num_tokens)

    def forward(self, step: PackedStep, *, is_kept: bool = True) -> Tensor:
        """Hidden states (N, D) after the final norm; keys and values go to the rows' slots unless they shall not be kept."""
        began = time.perf_counter()
        place_N = step.place_N if is_kept else torch.full_like(step.place_N, self._cache.trash_place)
        self._cache.prepare(step.slot_N, place_N)
        context = StepContext(step, self._windows, self.device)
        with slot_attention_in(self._backbone.config):
            hidden_1ND = run_backbone(
                self._backbone,
                step.token_N[None],
                step.position_N[None],
                pack_by_layer_type(context.signs),
                self._cache,
                decoding_step=context,
            )
        self.seconds += time.perf_counter() - began
        return hidden_1ND[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits (..., V) of hidden states (..., D), as `model(...).logits` has them."""
        began = time.perf_counter()
        logits = self._logit_transform(self._head(hidden)).float()
        self.seconds += time.perf_counter() - began
        return logits

    def fetch(self, numbers: Tensor) -> list[Any]:
        """Numbers on the host. On a GPU this is where a step waits for its model, so the wait counts as the model's."""
        began = time.perf_counter()
        values: list[Any] = numbers.tolist()
        self.seconds += time.perf_counter() - began
        return values

    @torch.inference_mode()
    def measure(self, num_rows: int, num_lanes: int, num_picks: int) -> float:
        """Seconds of a step of `num_rows` rows with `num_lanes` query tokens each, of which `num_picks` go through the head.

        Nothing of it is kept, so it may be called between steps.
        """
        # Sizes are powers of two, so the last may be larger than what a short slot holds.
        num_lanes = min(num_lanes, self._cache.trash_place)
        start = min(_CONTEXT_OF_MEASUREMENTS, self._max_length - 1, self._cache.trash_place - num_lanes)
        query = RowQuery([0] * num_lanes, num_lanes)
        rows = [PlacedQuery(slot, start, query) for slot in range(num_rows)]
        # On a CPU the seconds of this thread, which neighbours on a busy machine do not lengthen.
        clock = time.perf_counter if self.device.type == "cuda" else time.thread_time
        seconds = []
        for _ in range(_REPEATS):
            self._synchronize()
            began = clock()
            hidden_ND = self.forward(self.pack(rows), is_kept=False)
            self.logits(hidden_ND[: num_rows * num_picks]).argmax(dim=-1)
            self._synchronize()
            seconds.append(clock() - began)
        return min(seconds)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
