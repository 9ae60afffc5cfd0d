"""Tiny random models, samples and a word tokenizer: no downloads, float32, a few thousand parameters."""

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from workers.objectives.streams import Sample

VOCAB_SIZE = 41
MASK_ID = 40
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    # Large enough that a wrong mask or position moves the logits far beyond the tolerance.
    "initializer_range": 0.3,
}


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A random model in evaluation mode: `llama`, `llama_tied`, `qwen2`, `qwen2_sliding`, `mistral` or `gpt2`."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if model_type == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    elif model_type == "llama_tied":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    elif model_type == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    elif model_type == "qwen2_sliding":
        window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **window))
    elif model_type == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    elif model_type == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=1,
        )
        model = GPT2LMHeadModel(config)
    else:
        raise ValueError(model_type)
    return model.eval()


def random_samples(count: int, seed: int = 0, num_turns: int = 2) -> list[Sample]:
    """Samples of `num_turns` turns: prompt of 1..7 tokens, response of 1..13, a few template tokens behind."""
    generator = np.random.default_rng(seed)
    samples = []
    for row in range(count):
        length, responses = 0, []
        for _ in range(num_turns):
            start = length + int(generator.integers(1, 8))
            length = start + int(generator.integers(1, 14))
            responses.append((start, length))
        length += int(generator.integers(0, 3))
        token_ids = generator.integers(2, MASK_ID, size=length).astype(np.int32)
        samples.append(Sample(file=0, row=row, epoch=0, token_ids=token_ids, responses=tuple(responses)))
    return samples


WORDS = ["<unk>", "<s>", "</s>", "<pad>", "a", "b", "reserved", "mask"]


def word_tokenizer(*added: str, **roles: str) -> PreTrainedTokenizerFast:
    """Eight words, then `added` from id 8 on."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([AddedToken(token, special=True) for token in added])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **roles}
    return PreTrainedTokenizerFast(tokenizer_object=core, **named)
