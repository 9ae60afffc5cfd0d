"""What the decoding benchmarks decode: prompts, and a budget of tokens for each answer.

Equal work has prompts of one length and one budget: the best case of a static batch. Ragged work draws both from wide ranges; of a
file it has the prompts as they come.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decoding_models import Subject, walk
from workers.chat import encode_prompt
from workers.models.folder import inspect_model_folder, load_tokenizer, read_multi_token_settings

EQUAL, RAGGED, NATURAL = "equal", "ragged", "natural"


@dataclass(frozen=True)
class Work:
    """Rows in their order; `end_ids` end an answer before its budget; `seed` is that of replaced drafts."""

    prompts: tuple[tuple[int, ...], ...]
    budgets: tuple[int, ...]
    end_ids: frozenset[int]
    seed: int = 0

    @property
    def max_length(self) -> int:
        """Places that the longest row may take."""
        return max(len(prompt) + budget for prompt, budget in zip(self.prompts, self.budgets, strict=True))

    def start(self, num_rows: int, num_tokens: int) -> "Work":
        """The first rows with short answers."""
        budgets = tuple(min(budget, num_tokens) for budget in self.budgets[:num_rows])
        return replace(self, prompts=self.prompts[:num_rows], budgets=budgets)


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, ranges with both ends.

    Attributes:
        prompt, output: of equal work.
        num_ragged: rows of ragged work.
        ragged_prompts, ragged_outputs: its lengths.
        max_new_tokens: the budget where end tokens end answers.
    """

    prompt: int
    output: int
    num_ragged: int
    ragged_prompts: tuple[int, int]
    ragged_outputs: tuple[int, int]
    max_new_tokens: int = 256


FULL = Sizes(64, 64, 64, (8, 256), (8, 128))
QUICK = Sizes(8, 16, 16, (8, 64), (8, 32))


def equal_work(subject: Subject, num_rows: int, sizes: Sizes) -> Work:
    """Prompts and budgets of one length, end tokens ignored: every row takes part in every step.

    A file's prompts are cut to the shortest of them and keep their last tokens.
    """
    prompts = _prompts(subject, [sizes.prompt] * num_rows, 0)
    shortest = min(map(len, prompts))
    return Work(tuple(prompt[-shortest:] for prompt in prompts), (sizes.output,) * num_rows, frozenset())


def ragged_work(subject: Subject, num_rows: int, seed: int, sizes: Sizes) -> Work:
    """Prompts and answers of drawn lengths; end tokens are ignored, so that answers have their lengths."""
    generator = np.random.default_rng([seed, num_rows])
    num_prompts = generator.integers(*sizes.ragged_prompts, size=num_rows, endpoint=True).tolist()
    budgets = generator.integers(*sizes.ragged_outputs, size=num_rows, endpoint=True).tolist()
    return Work(tuple(_prompts(subject, num_prompts, seed)), tuple(budgets), frozenset())


def natural_work(subject: Subject, num_rows: int, seed: int, sizes: Sizes) -> Work:
    """Ragged work in which a model with end tokens ends its answers itself, within `max_new_tokens`."""
    work = ragged_work(subject, num_rows, seed, sizes)
    if not subject.end_ids:
        return work
    return replace(work, budgets=(sizes.max_new_tokens,) * num_rows, end_ids=subject.end_ids)


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
