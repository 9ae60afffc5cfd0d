"""Causal language models from Hugging Face folders, and their parts.

Shapes: N positions, D model width, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workers.errors import InputError
from workers.models.folder import (
    ModelFacts,
    MultiTokenSettings,
    inspect_model_folder,
    load_tokenizer,
    read_multi_token_settings,
)

__all__ = [
    "ModelFacts",
    "ModelParts",
    "MultiTokenSettings",
    "add_mask_row",
    "backbone_and_head",
    "init_mask_embedding",
    "inspect_model_folder",
    "load_causal_lm",
    "load_tokenizer",
    "read_multi_token_settings",
]


class ModelParts(NamedTuple):
    """`transform(head(backbone(...).last_hidden_state))` equals `model(...).logits`."""

    backbone: nn.Module
    head: nn.Module
    transform: Callable[[Tensor], Tensor]


def check_loadable(folder: str) -> type[PreTrainedModel]:
    """The class of a folder's model, from its config and the names of its files: no weights are read.

    Raises:
        InputError: no such folder, no config, no weights, or a model type that is no attention-only causal model.
    """
    facts = inspect_model_folder(folder)
    if not any(Path(folder).glob("*.safetensors")) and not any(Path(folder).glob("pytorch_model*.bin")):
        raise InputError(folder, "no weights", "model.safetensors, whole or in shards")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(folder, f"model type {facts.model_type}", "a causal language model")
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise InputError(folder, f"model type {facts.model_type}, which has recurrent state", "an attention-only model")
    return model_class


def load_causal_lm(folder: str, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder in evaluation mode, on the CPU unless a default device is set.

    Models that cannot run `sdpa` (Gemma 2 caps its attention scores) get `eager` instead.

    Raises:
        InputError: what `check_loadable` finds.
    """
    attention = "sdpa" if check_loadable(folder)._supports_sdpa else "eager"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except SafetensorError as error:
        raise InputError(folder, f"damaged weights ({error})", "whole safetensors files", "Copy them again.") from error
    return model.eval()


def backbone_and_head(model: PreTrainedModel) -> ModelParts:
    """The module up to the final norm, the head module, and what the model does to the head's output.

    Call the head as a module, never through `.weight`: parameters spread over ranks are gathered module by module.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    assert backbone is not model and isinstance(head, nn.Module)
    config = model.config.get_text_config()
    # Cohere and Falcon-H1 multiply, Granite divides, Gemma 2 and 3 cap.
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        factor *= getattr(config, name, None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0
    cap: float | None = getattr(config, "final_logit_softcapping", None)

    def transform(logits: Tensor) -> Tensor:
        if factor != 1.0:
            logits = logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return ModelParts(backbone, head, transform)


def add_mask_row(model: PreTrainedModel) -> None:
    """Grow the vocabulary by one row, in place, with the mean of the other rows in it; the new id is the old size."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(vocab_size + 1, mean_resizing=False)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        _set_to_mean_row(head.weight, vocab_size)
        if head.bias is not None:
            head.bias[vocab_size] = head.bias[:vocab_size].mean()
    init_mask_embedding(model, vocab_size)


def init_mask_embedding(model: PreTrainedModel, mask_token_id: int) -> None:
    """Set the input embedding of an untrained `[MASK]` to the mean of the other rows, in place.

    Not for a checkpoint that was trained with this id already: its row has been learned.
    """
    weight_VD = model.get_input_embeddings().weight
    assert 0 <= mask_token_id < weight_VD.shape[0]
    with torch.no_grad():
        _set_to_mean_row(weight_VD, mask_token_id)


def _set_to_mean_row(weight_VD: Tensor, row: int) -> None:
    total_D = weight_VD.sum(dim=0, dtype=torch.float32) - weight_VD[row].float()
    weight_VD[row] = (total_D / (weight_VD.shape[0] - 1)).to(weight_VD.dtype)
