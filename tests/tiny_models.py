"""Tiny random models, samples and a word tokenizer: no downloads, float32, a few thousand parameters."""

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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


SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True, **SLIDING}
# What a model type has beyond SIZES; windows are far shorter than the samples of the tests.
MODEL_TYPES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "smollm": {"tie_word_embeddings": True, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen2": {},
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**GEMMA, "rope_parameters": None},
    "gpt2": {},
}
_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_CONFIG_TYPES = {"llama_tied": "llama", "smollm": "llama", "qwen2_sliding": "qwen2"}


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A random model of one of `MODEL_TYPES` in evaluation mode, with the attention that folders are loaded with."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **(_GPT2_SIZES if model_type == "gpt2" else {}), **MODEL_TYPES[model_type]}
    config = AutoConfig.for_model(_CONFIG_TYPES.get(model_type, model_type), **sizes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
