"""Causal language models from Hugging Face folders, and their parts.

Shapes: N positions, D model width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from workers.errors import InputError
from workers.models.attention_masks import FLEX, attention_windows
from workers.models.folder import (
    ModelFacts,
    MultiTokenSettings,
    inspect_model_folder,
    load_tokenizer,
    read_multi_token_settings,
    unfit_config,
)

__all__ = [
    "ModelFacts",
    "ModelParts",
    "MultiTokenSettings",
    "add_mask_row",
    "backbone_and_head",
    "check_flex_attention",
    "choose_attention",
    "init_mask_embedding",
    "inspect_model_folder",
    "load_causal_lm",
    "load_tokenizer",
    "read_multi_token_settings",
]

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_SMALLEST_FLEX_HEAD = 16


class ModelParts(NamedTuple):
    """`transform(head(backbone(...).last_hidden_state))` equals `model(...).logits`."""

    backbone: nn.Module
    head: nn.Module
    transform: Callable[[Tensor], Tensor]


def check_loadable(folder: str) -> None:
    """Refuses a folder from which no model can be loaded, by its config and the names of its files: no weights are read.

    Raises:
        InputError: no such folder, no config, no weights, or a model type that is no attention-only causal model.
    """
    _model_class(folder)
    if not any(Path(folder).glob("*.safetensors")) and not any(Path(folder).glob("pytorch_model*.bin")):
        raise InputError(folder, "no weights", "model.safetensors, whole or in shards")


def _model_class(folder: str) -> type[PreTrainedModel]:
    facts = inspect_model_folder(folder)
    config = _load_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(folder, f"model type {facts.model_type}", "a causal language model")
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise InputError(folder, f"model type {facts.model_type}, which has recurrent state", "an attention-only model")
    attention_windows(config)
    return model_class


def _load_config(folder: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except StrictDataclassError as error:
        raise unfit_config(folder, error) from error
    return config


def load_causal_lm(
    folder: str, *, dtype: torch.dtype, attention: Literal["dense", "flex"] = "dense"
) -> PreTrainedModel:
    """The model of a folder in evaluation mode, on the CPU unless a default device is set.

    Args:
        folder: the model folder.
        dtype: of the weights.
        attention: `dense` runs `sdpa`, or `eager` where a model cannot (Gemma 2 caps its attention scores); `flex` is
            FlexAttention, for training on GPUs.

    Raises:
        InputError: what `check_loadable` and, with `flex`, `check_flex_attention` find; weights that are damaged, missing
            or of other shapes than config.json says.
    """
    check_loadable(folder)
    if attention == "flex":
        check_flex_attention(folder)
        # One kernel for each window, number of rows (one, several), and with or without gradients: more than the default of
        # 8, beyond which torch would silently hold all scores in memory.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        implementation = FLEX
    else:
        implementation = "sdpa" if _model_class(folder)._supports_sdpa else "eager"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=implementation,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except SafetensorError as error:
        raise InputError(folder, f"damaged weights ({error})", "whole safetensors files", "Copy them again.") from error
    _refuse_other_weights(folder, report)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _refuse_other_weights(folder: str, report: Mapping[str, Any]) -> None:
    """Weights that config.json asks for and the files do not have would be random ones, without a word."""
    misshapen = [
        f"{name} of shape {list(found)}, not {list(asked)}" for name, found, asked in report["mismatched_keys"]
    ]
    missing = [f"no {name}" for name in report["missing_keys"]]
    others = sorted(misshapen) + sorted(missing)
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise InputError(f"{folder}: weights", "; ".join(others[:3]) + more, "the weights that config.json describes")


def choose_attention(
    folder: str, wanted: Literal["auto", "dense", "flex"], *, on_gpu: bool
) -> Literal["dense", "flex"]:
    """What `model.attention` means for a model: `auto` is FlexAttention on GPUs for every model that can run it."""
    if wanted != "auto":
        return wanted
    return "flex" if on_gpu and _obstacle_to_flex(folder) is None else "dense"


def check_flex_attention(folder: str) -> None:
    """Refuses a model that cannot be trained with FlexAttention.

    Raises:
        InputError: names what stands in the way, or that the model type is no attention-only causal model.
    """
    obstacle = _obstacle_to_flex(folder)
    if obstacle is not None:
        raise InputError("model.attention", f"flex, but {folder} has {obstacle}", "auto or dense for this model")


def _obstacle_to_flex(folder: str) -> str | None:
    model_class = _model_class(folder)
    config = _load_config(folder).get_text_config()
    if not model_class._supports_flex_attn:
        return f"model type {config.model_type}, for which transformers has no FlexAttention"
    dropout = next((name for name in _ATTENTION_DROPOUTS if getattr(config, name, None)), None)
    if dropout is not None:
        return f"{dropout} {getattr(config, dropout)}, which FlexAttention does not do"
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_size < _SMALLEST_FLEX_HEAD:
        return f"attention heads of {head_size}, below the {_SMALLEST_FLEX_HEAD} of its GPU kernels"
    return None


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
