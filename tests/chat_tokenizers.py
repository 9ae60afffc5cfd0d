"""Byte-level tokenizers with chat templates, built without downloads."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|bos|>",
    "<|end|>",
    "<|pad|>",
    "<|mask|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|tool|>",
    "<|eos|>",
)
BOS_ID, END_ID, PAD_ID, MASK_ID = 0, 1, 2, 3
EOS_ID = 8

# The template writes a line break behind each turn, as ChatML does, and its own BOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Only the last answer keeps its thoughts: earlier turns are written anew.
REWRITING_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] if loop.last else message['content'].split('#')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# No end-of-turn token at all.
ENDLESS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# As Phi-3: an eos token behind everything unless an answer is asked for, so a longer rendering does not begin with a shorter one.
CLOSING_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE,
    *,
    eos: str | None = "<|end|>",
    pad: str = "<|pad|>",
    adds_eos: bool = False,
) -> PreTrainedTokenizerFast:
    """One id per byte behind the special tokens; on its own it puts a BOS in front (and an eos behind)."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>" if adds_eos else "<|bos|> $A",
        special_tokens=[("<|bos|>", BOS_ID), ("<|eos|>", EOS_ID)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token=eos,
        pad_token=pad,
        mask_token="<|mask|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
