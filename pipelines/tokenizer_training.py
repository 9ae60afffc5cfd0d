"""A tokenizer trained on the SFT texts, and a model folder with random weights, for runs that start from nothing."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging as transformers_logging

from workers.config import FromScratch
from workers.errors import InputError

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
MASK_TOKEN = "<|mask|>"
ROLES = ("system", "user", "assistant")
# The pre-tokenizer of Qwen2, single digits included. AutoTokenizer puts it into the tokenizer of any folder whose model type is
# qwen2, whatever tokenizer.json says, so ours has it too: the folder means the same to every reader.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES), MASK_TOKEN)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterator[str], *, vocab_size: int, max_positions: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits and a chat template; any text survives encoding and decoding.

    The texts are read once, as a stream. The vocabulary has at most `vocab_size` ids: fewer when no more pairs are left to merge.

    Raises:
        InputError: `vocab_size` has no room for the special tokens and the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise InputError("model.from_scratch.vocab_size", str(vocab_size), f"at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        unk_token=PAD_TOKEN,  # never produced; if it is missing, AutoTokenizer adds an id of its own for qwen2
        eos_token=END_TOKEN,
        mask_token=MASK_TOKEN,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )


def create_model_folder(
    settings: FromScratch, tokenizer: PreTrainedTokenizerFast, folder: str | Path, seed: int
) -> None:
    """Writes an ordinary Hugging Face folder: config, generation config, tokenizer and random float32 weights.

    The model has one embedding row per token of the tokenizer, shared with the head. The weights depend on `seed` alone; the
    caller's random state is left as it was. The folder appears whole or not at all.
    """
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "max_position_embeddings": settings.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    config = LlamaConfig(**shared) if settings.architecture == "llama" else Qwen2Config(**shared)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    unfinished = Path(folder).with_name(f".{Path(folder).name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    transformers_logging.disable_progress_bar()  # one small file; the jobs have their own progress
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.rename(unfinished, folder)
