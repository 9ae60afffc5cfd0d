"""What the answers in an output folder are worth: right by a validator, or the same as another folder's."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from pipelines.quickstart_task import validate_answer
from workers.config import PromptSettings
from workers.errors import InputError

# Looks at an output row with its prompt and says `ok`, what is wrong, or None for a prompt that it does not know.
Validator = Callable[[Mapping[str, Any], str], str | None]


def validate_quickstart(row: Mapping[str, Any], answer: str) -> str | None:
    """The verdict of the quickstart task's validator, or None when the prompt is not one of that task."""
    prompt = {name: row[name] for name in ("messages", "prompt") if row.get(name) is not None}
    try:
        return validate_answer(prompt, answer).reason
    except InputError:
        return None


def score(output: str, prompts: PromptSettings, validator: Validator) -> Counter[str]:
    """The verdicts on the answers in an output folder; answers to prompts that the validator does not know are left out."""
    verdicts: Counter[str] = Counter()
    names = {prompts.prompt_column: "prompt", prompts.messages_column: "messages"}
    for table in _parts(output, ["text", *prompts.passthrough]):
        for row in table.to_pylist():
            verdict = validator({names.get(name, name): value for name, value in row.items()}, row["text"])
            if verdict is not None:
                verdicts[verdict] += 1
    return verdicts


def accuracy(verdicts: Mapping[str, int], num_errors: int) -> float | None:
    """Valid answers / rows of the validator's task, where a row without an answer is a wrong one; None for another task.

    Args:
        verdicts: of `score`.
        num_errors: rows without an answer; they count as rows of the task when any of the answers belongs to it.
    """
    num_scored = sum(verdicts.values())
    return verdicts.get("ok", 0) / (num_scored + num_errors) if num_scored else None


def tokens_by_id(output: str) -> dict[str | int, int]:
    """A hash of the tokens of each answer in an output folder."""
    tokens: dict[str | int, int] = {}
    for table in _parts(output, ["id", "token_ids"]):
        ids, answers = table["id"].to_pylist(), table["token_ids"].to_pylist()
        tokens.update({row: hash(tuple(answer)) for row, answer in zip(ids, answers, strict=True)})
    return tokens


def _parts(output: str, columns: list[str]) -> Iterator[pa.Table]:
    """The files of an output folder that hold answers."""
    for info in storage.list_folder(output):
        if info.path[len(output.rstrip("/")) + 1 :].startswith("part-"):
            with storage.open_read(info.path) as file:
                yield pq.read_table(file, columns=columns)
