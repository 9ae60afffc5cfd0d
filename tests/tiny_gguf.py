"""A tiny Llama in a GGUF file as llama.cpp writes them: names of its own, rows of queries and keys in another order."""

from pathlib import Path

import gguf
import numpy as np
import torch
from chat_tokenizers import CHAT_TEMPLATE, byte_tokenizer
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

NUM_HEADS, NUM_KV_HEADS = 4, 2
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def write_tiny_gguf(path: Path, architecture: str = "llama") -> LlamaForCausalLM:
    """Writes the file and returns the model that is in it. Its tokenizer has one token per byte, one of two, and an unused one."""
    tokenizer = byte_tokenizer()
    tokens = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), "he", "<unused0>"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    special = [token.startswith("<") and token.endswith(">") for token in tokens]
    writer.add_token_types([gguf.TokenType.CONTROL if flag else gguf.TokenType.NORMAL for flag in special])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_unk_token_id(tokens.index("<|pad|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(2):
        for name, module in LAYER_NAMES.items():
            weight = state[f"model.layers.{layer}.{module}.weight"]
            heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}.get(name)
            weight = weight if heads is None else _interleaved(weight, heads)
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """The halves of each head's rotary pairs side by side, as llama.cpp keeps them."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
