"""Models in single GGUF files, the format of llama.cpp, as ordinary Hugging Face folders."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from workers.errors import InputError

_MAGIC = b"GGUF"


def is_gguf(path: str) -> bool:
    """Whether a model path names a GGUF file rather than a folder."""
    return path.endswith(".gguf")


def convert_gguf(path: str, folder: str) -> None:
    """Writes the model of a GGUF file to a folder: float32 weights, config, tokenizer and chat template.

    Quantised weights are expanded; what quantising has lost stays lost. The folder appears whole or not at all.

    Raises:
        InputError: what `describe_gguf` finds.
    """
    config = _read_config(path)
    quantised = _read(path, AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    # A model that was read from a GGUF file counts as quantised and does not save, so its weights move to a fresh one.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    unfinished = Path(folder).with_name(f".{Path(folder).name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(unfinished)
    _read(path, AutoTokenizer.from_pretrained).save_pretrained(unfinished)
    os.rename(unfinished, folder)


def describe_gguf(path: str, folder: str) -> None:
    """Writes what the header of a GGUF file says to a folder: config, tokenizer and chat template, no weights.

    Raises:
        InputError: no such file, no GGUF file, or no causal language model that transformers can read from one.
    """
    _read_config(path).save_pretrained(folder)
    _read(path, AutoTokenizer.from_pretrained).save_pretrained(folder)


def _read_config(path: str) -> PreTrainedConfig:
    source = Path(path)
    if not source.is_file():
        raise InputError("model.path", path, "a .gguf file that exists")
    with source.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise InputError("model.path", f"{path}, which does not begin as a GGUF file does", "a GGUF file")
    config: PreTrainedConfig = _read(path, AutoConfig.from_pretrained)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError("model.path", f"{path}, of model type {config.model_type}", "a causal language model")
    return config


def _read(path: str, load: Callable[..., Any], **options: Any) -> Any:
    source = Path(path)
    try:
        return load(source.parent, gguf_file=source.name, **options)
    # what the reader raises for an architecture or tokenizer that it does not know, and for a file cut short
    except (ValueError, KeyError, IndexError, NotImplementedError, struct.error) as error:
        raise InputError(
            "model.path", f"{path} ({error})", "a whole GGUF file of a model that transformers reads from GGUF"
        ) from error
