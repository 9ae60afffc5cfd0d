"""Which token id is the `[MASK]` placeholder. Torch-free."""

import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from workers.errors import InputError

MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]", "<|mdm_mask|>", "<|MASK|>", "[mask]")
# Names that model makers give to rows kept for later use: <|reserved_special_token_0|> (Llama 3), <unused0> (Gemma),
# [unused1] (BERT), <extra_id_0> (T5), <|dummy_0|> (Phi), [control_8] (Mistral), <SPECIAL_20> (Tekken).
RESERVED_NAME = re.compile(
    r"[<\[]\|?(?:\w*reserved\w*|unused_?\d*|extra_id_\d+|dummy\w*|control_\d+|special_\d+)\|?[>\]]"
)
NATIVE_ROLES = ("eos_token", "bos_token", "pad_token", "unk_token", "cls_token", "sep_token")
ADVICE = (
    "Set model.add_mask_row=true to grow the vocabulary by one row, or model.mask_token to a token that is never "
    "generated."
)


@dataclass(frozen=True)
class Placeholder:
    """The id of `[MASK]`; with `added_row` it is one beyond the embedding rows, which have to grow by one."""

    token_id: int
    added_row: bool


def find_placeholder(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, mask_token: str = "auto", add_mask_row: bool = False
) -> Placeholder:
    """A token id that is never generated, to stand for tokens that are yet to be predicted.

    In order of preference: the token asked for; the tokenizer's mask token; an added token named like one; an added
    token with a reserved name; an embedding row that no token uses; with `add_mask_row`, a new row. Never a token with
    another role (end, begin, padding, unknown) or one that the chat template writes.

    Args:
        tokenizer: of the model folder.
        vocab_size: embedding rows of the model.
        mask_token: `auto`, or a token of the vocabulary.
        add_mask_row: whether the vocabulary may grow when no id is free.

    Raises:
        InputError: `mask_token` is unknown or has another role, or no id is free.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    taken = _ids_with_a_role(tokenizer)
    if mask_token != "auto":
        return Placeholder(_asked_for(mask_token, vocabulary, taken, vocab_size), added_row=False)

    added = {token.content: token_id for token_id, token in sorted(tokenizer.added_tokens_decoder.items())}
    own = [tokenizer.mask_token] if tokenizer.mask_token is not None else []
    named = [name for name in MASK_NAMES if name in added]
    reserved = [name for name in added if RESERVED_NAME.fullmatch(name.lower())]
    for name in (*own, *named, *reserved):
        token_id = vocabulary[name]
        if token_id < vocab_size and token_id not in taken:
            return Placeholder(token_id, added_row=False)

    unused = sorted(set(range(vocab_size)) - set(vocabulary.values()) - taken)
    if unused:
        return Placeholder(unused[0], added_row=False)
    if add_mask_row:
        return Placeholder(vocab_size, added_row=True)
    raise InputError("model", f"a vocabulary of {vocab_size} rows without a free id", "an id for [MASK]", ADVICE)


def _ids_with_a_role(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that mean something to the model already."""
    tokens = {getattr(tokenizer, role) for role in NATIVE_ROLES} - {None}
    templates = tokenizer.chat_template or ""
    if isinstance(templates, dict):
        templates = "\n".join(templates.values())
    vocabulary = tokenizer.get_vocab()
    written = {token.content for token in tokenizer.added_tokens_decoder.values() if token.content in templates}
    return {vocabulary[token] for token in tokens | written if token in vocabulary}


def _asked_for(mask_token: str, vocabulary: dict[str, int], taken: set[int], vocab_size: int) -> int:
    token_id = vocabulary.get(mask_token)
    if token_id is None or token_id >= vocab_size:
        raise InputError("model.mask_token", repr(mask_token), "a token of the model's vocabulary, or auto")
    if token_id in taken:
        found = f"{mask_token!r}, which ends, begins or fills texts or stands in the chat template"
        raise InputError("model.mask_token", found, "a token without another role")
    return token_id
