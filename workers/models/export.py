"""Checkpoints as ordinary Hugging Face folders, which `transformers` and others load unchanged."""

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from workers.models.export_check import check_written_weights
from workers.models.folder import MultiTokenSettings, write_multi_token_settings


def export_folder(
    model_state: Mapping[str, Tensor] | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: MultiTokenSettings,
    folder: str,
) -> None:
    """Write weights (safetensors), config, generation config, tokenizer and `marsray.json`; replaces an older folder.

    Everything is written to a folder beside it, read back and renamed, so that a reader sees a whole folder or none.

    Args:
        model_state: full weights under the model's own names, of any floating dtype; None takes those of `model`.
            Weights are stored in the dtype of `model`.
        model: gives config and generation config; its parameters may be spread over ranks when `model_state` is given.
        tokenizer: stored with its chat template.
        settings: the mask id among them is suppressed in `generate`, so that its greedy answers equal ours.
        folder: destination; its parent is created.

    Raises:
        ExportError: the weights on disk are not those of the model.
    """
    destination = Path(folder).absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    state = model.state_dict() if model_state is None else model_state
    stored = {name: _in_dtype(tensor, model) for name, tensor in state.items()}
    model.save_pretrained(unfinished, state_dict=dict(stored))
    check_written_weights(stored, model, unfinished)
    _generation_config(model, tokenizer, settings.mask_token_id).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    write_multi_token_settings(settings, unfinished)
    _replace_folder(unfinished, destination)


def _in_dtype(tensor: Tensor, model: PreTrainedModel) -> Tensor:
    return tensor.detach().to("cpu", model.dtype) if tensor.is_floating_point() else tensor.detach().cpu()


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mask_token_id: int
) -> GenerationConfig:
    """The model's own, with the mask id among the suppressed tokens, and all that ends a turn of ours among the end ids."""
    generation_config = copy.deepcopy(model.generation_config) or GenerationConfig.from_model_config(model.config)
    suppressed = set(generation_config.suppress_tokens or [])
    generation_config.suppress_tokens = sorted(suppressed | {mask_token_id})
    stated = (generation_config.eos_token_id, model.config.get_text_config().eos_token_id, tokenizer.eos_token_id)
    end_ids = {end_id for ids in stated for end_id in (ids if isinstance(ids, list) else [ids]) if end_id is not None}
    generation_config.eos_token_id = sorted(end_ids) or None
    return generation_config


def _replace_folder(finished: Path, destination: Path) -> None:
    """Rename `finished` to `destination`; a folder cannot be renamed onto another, so the older one steps aside."""
    replaced = destination.with_name(f".{destination.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if destination.exists():
        os.rename(destination, replaced)
    os.rename(finished, destination)
    shutil.rmtree(replaced, ignore_errors=True)
