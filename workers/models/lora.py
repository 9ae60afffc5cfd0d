"""Low-rank adapters (LoRA, arXiv 2106.09685) through `peft`: put into a model, trained in place of its weights, merged for export.

The model keeps its class and its parts; only its linear layers, and the embedding when a row of it is trained, are wrapped. So
everything that trains a model trains an adapted one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from workers.config import LoraSettings
from workers.errors import InputError

if TYPE_CHECKING:
    from peft import PeftModel


def check_lora(lora: LoraSettings, folder: str) -> None:
    """Whether the model of a folder can be adapted as the settings say; reads its config only.

    Raises:
        InputError: `peft` is missing, a target is no linear layer of the decoder, the rank is not below the sides of all that
            are adapted, or the model cannot be adapted.
    """
    _import_peft()
    with torch.device("meta"):
        _require_adaptable(
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True)), lora
        )


def add_adapters(model: PreTrainedModel, lora: LoraSettings, *, trained_token_id: int | None, seed: int) -> None:
    """Freezes a model and adds adapters to it, in place; nothing that it computes changes yet.

    Args:
        trained_token_id: a row of the input embedding that is trained as well; a head that shares the embedding's weights
            shares this row.
        seed: of the new weights, which are the same on every rank.

    Raises:
        InputError: what `check_lora` finds.
    """
    _adapted(model, lora, trained_token_id, seed)


def merge_adapters(
    state: Mapping[str, Tensor], start: PreTrainedModel, lora: LoraSettings, *, trained_token_id: int | None
) -> PreTrainedModel:
    """An ordinary model, on the CPU in the type of `start`, with trained adapters merged into its weights.

    The sums are taken in float32.

    Args:
        state: all weights of the adapted model, under the names that they have in it.
        start: the model as it was before it was adapted; taken apart.
    """
    dtype = start.dtype
    adapted = _adapted(start.float(), lora, trained_token_id, seed=0)
    start.load_state_dict(state)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.to(dtype)


def _adapted(model: PreTrainedModel, lora: LoraSettings, trained_token_id: int | None, seed: int) -> "PeftModel":
    peft = _import_peft()
    _require_adaptable(model, lora)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or "all-linear",
        trainable_token_indices=None if trained_token_id is None else [trained_token_id],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The engine decides on the type of what is trained.
        adapted: PeftModel = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted


def _require_adaptable(model: PreTrainedModel, lora: LoraSettings) -> None:
    head = model.get_output_embeddings()
    linear = {
        name: min(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    targeted = {
        target: [name for name in linear if name == target or name.endswith(f".{target}")]
        for target in lora.target_modules
    }
    for target, names in targeted.items():
        if not names:
            found = sorted({name.rpartition(".")[2] for name in linear})
            raise InputError("lora.target_modules", repr(target), f"linear layers of the decoder: {', '.join(found)}")
    adapted = [name for names in targeted.values() for name in names] or list(linear)
    smallest = min(adapted, key=linear.__getitem__)
    if lora.rank >= linear[smallest]:
        raise InputError(
            "lora.rank",
            str(lora.rank),
            f"less than {linear[smallest]}, the smaller side of {smallest}",
            "Lower it, or leave that layer out of lora.target_modules.",
        )
    if model.all_tied_weights_keys and getattr(head, "bias", None) is not None:
        # peft would apply the shared weights without it.
        raise InputError(
            "lora", f"a {model.config.model_type} model whose head shares the embedding and has a bias", "null"
        )


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError("lora", "a setting that needs the package peft", "peft", "Run `pip install peft`.") from error
    return peft
