"""What a Hugging Face model folder says about its model, read without loading the weights. Torch-free."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workers.config import PromptFormat
from workers.errors import InputError

MULTI_TOKEN_FILE = "marsray.json"
_EXPORT_AGAIN = "Export the checkpoint again."
_COPY_TOKENIZER = "Copy the model's tokenizer."
_TOKENIZER_JSON = ("tokenizer.json", "tokenizer_config.json")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_MAX_BLOCK_SIZE = 64  # the largest window of a row
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
# Models whose state is not a list of keys and values: positions cannot be masked, repeated or taken back.
RECURRENT_TYPES = frozenset(
    [
        "bailing_hybrid",
        "bamba",
        "deepseek_v4",
        "falcon_h1",
        "falcon_mamba",
        "glm5_next",
        "granitemoehybrid",
        "inkling",
        "inkling2",
        "inkling2_loop",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_text",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    ]
)
# Models that make positions from the order of tokens: a placeholder could not stand where its token does.
ALIBI_TYPES = frozenset(["bloom", "mpt"])


@dataclass(frozen=True)
class ModelFacts:
    """Of a model folder: embedding rows, type, longest sequence (None: no limit given), ids that end an answer."""

    vocab_size: int
    model_type: str
    max_positions: int | None
    end_ids: frozenset[int]


@dataclass(frozen=True)
class MultiTokenSettings:
    """What a decoder has to know about a checkpoint beyond its Hugging Face files; the content of `marsray.json`."""

    mask_token_id: int
    block_size: int
    prompt_format: PromptFormat
    objective: str


def inspect_model_folder(folder: str) -> ModelFacts:
    """Facts from config.json, generation_config.json and the tokenizer's files.

    Raises:
        InputError: no such folder, no readable config.json or tokenizer.json, or a model type with recurrent state or ALiBi.
    """
    config = _read_config(folder)
    model_type = str(config.get("model_type"))
    if model_type in RECURRENT_TYPES:
        raise InputError(folder, f"model type {model_type}, which has recurrent state", "an attention-only model type")
    if model_type in ALIBI_TYPES or config.get("alibi"):
        raise InputError(folder, f"model type {model_type} with ALiBi", "a model that takes position ids")
    text_config = config.get("text_config") or config
    where = f"{folder}/config.json"
    if "vocab_size" not in text_config:
        raise InputError(where, "no vocab_size", "the config of a causal language model")
    vocab_size = _whole_number(text_config["vocab_size"], f"{where}: vocab_size")
    lengths = {name: text_config[name] for name in _LENGTHS if text_config.get(name) is not None}
    end_ids = _end_ids(folder, text_config)
    beyond = sorted(end_id for end_id in end_ids if end_id >= vocab_size)
    if beyond:
        raise InputError(f"{folder}: eos_token_id", str(beyond[0]), f"an id from 0 to {vocab_size - 1}")
    return ModelFacts(
        vocab_size=vocab_size,
        model_type=model_type,
        max_positions=next((_whole_number(length, f"{where}: {name}") for name, length in lengths.items()), None),
        end_ids=end_ids,
    )


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, which must have one of its own.

    Raises:
        InputError: no such folder, or no tokenizer files in it that can be read.
    """
    _require_folder(folder)
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(folder, "no tokenizer", f"one of {', '.join(TOKENIZER_FILES)}", _COPY_TOKENIZER)
    for name in _TOKENIZER_JSON:
        if (Path(folder) / name).is_file():
            _read_json(Path(folder) / name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except StrictDataclassError as error:
        raise unfit_config(folder, error) from error
    except Exception as error:
        # The tokenizers library has no exception class of its own; transformers passes on what broken files cause.
        if type(error) is not Exception and not isinstance(
            error, LookupError | ValueError | TypeError | AttributeError
        ):
            raise
        names = ", ".join(name for name in (*_TOKENIZER_JSON, *TOKENIZER_FILES[1:]) if (Path(folder) / name).is_file())
        raise InputError(f"{folder}: {names}", f"no tokenizer ({error})", "a tokenizer", _COPY_TOKENIZER) from error
    return tokenizer


def unfit_config(folder: str, error: StrictDataclassError) -> InputError:
    """What to raise when transformers does not accept the values of config.json."""
    return InputError(f"{folder}/config.json", " ".join(str(error).split()), "the config of a causal language model")


def read_multi_token_settings(folder: str, vocab_size: int | None = None) -> MultiTokenSettings | None:
    """The settings in `marsray.json`; None when the folder has none, as an ordinary model.

    Args:
        folder: the model folder.
        vocab_size: embedding rows of the model, where they are known: the mask id must be one of them.

    Raises:
        InputError: the file is not what `write_multi_token_settings` writes; names the field.
    """
    path = Path(folder) / MULTI_TOKEN_FILE
    if not path.is_file():
        return None
    values = _read_json(path)
    types = {"mask_token_id": int, "block_size": int, "prompt_format": str, "objective": str}
    if {name: type(value) for name, value in values.items()} != types:
        expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())
        raise InputError(str(path), f"the keys {', '.join(sorted(values))}", expected, _EXPORT_AGAIN)
    settings = MultiTokenSettings(**values)
    formats = get_args(PromptFormat)
    largest_id = None if vocab_size is None else vocab_size - 1
    is_token = settings.mask_token_id >= 0 and (largest_id is None or settings.mask_token_id <= largest_id)
    ids = "a token id of at least 0" if largest_id is None else f"a token id of the model, 0..{largest_id}"
    for field, is_right, expected in (
        ("mask_token_id", is_token, ids),
        ("block_size", 1 <= settings.block_size <= _MAX_BLOCK_SIZE, f"1..{_MAX_BLOCK_SIZE}"),
        ("prompt_format", settings.prompt_format in formats, " or ".join(formats)),
    ):
        if not is_right:
            raise InputError(f"{path}, {field}", repr(values[field]), expected, _EXPORT_AGAIN)
    return settings


def write_multi_token_settings(settings: MultiTokenSettings, folder: Path) -> None:
    """Put `marsray.json` into a model folder."""
    (folder / MULTI_TOKEN_FILE).write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")


def _require_folder(folder: str) -> None:
    if not Path(folder).is_dir():
        advice = "A model of the Hub wants downloading first: hf download NAME --local-dir FOLDER"
        raise InputError(f"model {folder}", "no folder there", "a local folder with a Hugging Face model", advice)


def _read_config(folder: str) -> dict[str, Any]:
    _require_folder(folder)
    path = Path(folder) / "config.json"
    if not path.is_file():
        # The folder of a run, or of a stage of it.
        inner = next((found for name in ("", "mars", "sft") if (found := Path(folder, name, "model")).is_dir()), None)
        advice = f"Did you mean {inner}?" if inner else ""
        raise InputError(folder, "no config.json", "a Hugging Face model folder", advice)
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"invalid JSON ({error})", "a JSON object") from error
    if not isinstance(values, dict):
        raise InputError(str(path), f"a JSON {type(values).__name__}", "a JSON object")
    return values


def _end_ids(folder: str, text_config: dict[str, Any]) -> frozenset[int]:
    """All that ends an answer: end ids of the generation config, of the model config, and of the tokenizer."""
    stated = {f"{folder}/config.json: eos_token_id": text_config.get("eos_token_id")}
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        stated[f"{generation}: eos_token_id"] = _read_json(generation).get("eos_token_id")
    ids = {
        _whole_number(entry, where)
        for where, value in stated.items()
        for entry in (value if isinstance(value, list) else [value])
        if entry is not None
    }
    return frozenset(ids | _tokenizer_end_ids(folder))


def _whole_number(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(where, repr(value), "a whole number of at least 0")
    return value


def _tokenizer_end_ids(folder: str) -> set[int]:
    """The id of the tokenizer's end token, from its files; empty when they name none."""
    settings, tokenizer = (Path(folder) / name for name in ("tokenizer_config.json", "tokenizer.json"))
    if not (settings.is_file() and tokenizer.is_file()):
        return set()
    end_token = _read_json(settings).get("eos_token")
    name = end_token.get("content") if isinstance(end_token, dict) else end_token
    content = _read_json(tokenizer)
    try:
        known = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        vocabulary = content["model"].get("vocab")
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(str(tokenizer), "no tokenizer", "the file of a fast tokenizer", _COPY_TOKENIZER) from error
    # A unigram vocabulary is a list of pairs; its special tokens are all among the added ones.
    if isinstance(vocabulary, dict):
        known = {**vocabulary, **known}
    return {_whole_number(known[name], f"{tokenizer}: id of {name}")} if name in known else set()
