"""What the decoding benchmarks decode: prompts, and a budget of tokens for each answer.

Equal work has prompts of one length and one budget: the best case of a static batch. Ragged work has the lengths of GSM8K, or a
file's prompts as they come.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decoding_models import Subject, walk
from benchmarks.lengths import PROMPT_QUANTILES, RESPONSE_QUANTILES, random_samples
from workers.chat import encode_prompt
from workers.models.folder import inspect_model_folder, load_tokenizer, read_multi_token_settings

EQUAL, RAGGED = "equal", "ragged"
_SHORTEST = 2


@dataclass(frozen=True)
class Work:
    """Rows in their order; `end_ids` end an answer before its budget."""

    prompts: tuple[tuple[int, ...], ...]
    budgets: tuple[int, ...]
    end_ids: frozenset[int]

    @property
    def max_length(self) -> int:
        """Places that the longest row may take."""
        return max(len(prompt) + budget for prompt, budget in zip(self.prompts, self.budgets, strict=True))


@dataclass(frozen=True)
class Lengths:
    """`scale` multiplies the drawn lengths of GSM8K; `max_new_tokens` is the budget where end tokens end answers."""

    scale: float
    max_new_tokens: int

    def scaled(self, length: int) -> int:
        """A drawn length, not below two tokens."""
        return max(_SHORTEST, round(self.scale * length))


def equal_work(subject: Subject, num_rows: int, seed: int, lengths: Lengths) -> Work:
    """Prompts and budgets of one length, end tokens ignored: every row takes part in every step.

    A file's prompts are cut to the shortest of them and keep their last tokens.
    """
    median = len(PROMPT_QUANTILES) // 2
    num_prompt, budget = lengths.scaled(PROMPT_QUANTILES[median]), lengths.scaled(RESPONSE_QUANTILES[median])
    prompts = _prompts(subject, [num_prompt] * num_rows, seed)
    shortest = min(map(len, prompts))
    return Work(tuple(prompt[-shortest:] for prompt in prompts), (budget,) * num_rows, frozenset())


def ragged_work(subject: Subject, num_rows: int, seed: int, lengths: Lengths) -> Work:
    """Prompts and answers of the lengths of GSM8K; a model with end tokens ends its answers itself, within `max_new_tokens`."""
    samples = random_samples(num_rows, seed, vocab_size=subject.mask_token_id + 1)
    spans = [sample.responses[0] for sample in samples]
    prompts = _prompts(subject, [lengths.scaled(start) for start, _ in spans], seed)
    budgets = [lengths.max_new_tokens if subject.end_ids else lengths.scaled(end - start) for start, end in spans]
    return Work(tuple(prompts), tuple(budgets), subject.end_ids)


def _prompts(subject: Subject, lengths: list[int], seed: int) -> list[tuple[int, ...]]:
    """Of a file the next rows, those of another seed being others while there are enough; else drawn ones."""
    if subject.prompts:
        first = seed * len(lengths)
        return [subject.prompts[(first + row) % len(subject.prompts)] for row in range(len(lengths))]
    generator = np.random.default_rng(seed)
    if subject.is_walk:
        return [tuple(walk(generator, length)) for length in lengths]
    return [tuple(generator.integers(0, subject.mask_token_id, size=length).tolist()) for length in lengths]


def read_prompts(path: str, column: str, folder: str, max_prompts: int) -> list[tuple[int, ...]]:
    """The first prompts of a file as the model of `folder` is asked them.

    Args:
        path: JSONL, or Parquet (a file, or a folder of files).
        column: text, or a list of messages whose last answer is left out.
        folder: the model folder, for its tokenizer and prompt format.
        max_prompts: rows to read.
    """
    tokenizer, end_ids = load_tokenizer(folder), inspect_model_folder(folder).end_ids
    settings = read_multi_token_settings(folder)
    prompt_format = "chat" if settings is None else settings.prompt_format
    prompts = []
    for value in _column(Path(path), column)[:max_prompts]:
        turns = value
        if isinstance(value, list) and value[-1]["role"] == "assistant":
            turns = value[:-1]
        prompts.append(tuple(encode_prompt(tokenizer, turns, prompt_format=prompt_format, end_ids=end_ids)))
    return prompts


def _column(path: Path, column: str) -> list[Any]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            return [json.loads(line)[column] for line in lines]
    import pyarrow.parquet as pq

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    return [value for file in files for value in pq.read_table(file, columns=[column])[column].to_pylist()]
