"""The quickstart's synthetic SFT task: worked additions, some with a free choice whose parts must agree. No ray, no torch.

A prompt tells of two operands and asks for their total. The answer adds digit by digit, from the units up, one line per digit
(`digit+digit+carry=two-digit sum`), and ends with the total; every token of it follows from the prompt:

    Tom packs 347 pens and 582 more. How many?
    7+2+0=09
    4+8+0=12
    3+5+1=09
    Total 929.

Some prompts also ask `Describe the box first.` The first line of the answer then has one word of each pair in `PHRASE_PAIRS`, and
the choice must be one of the five cyclic shifts of `aaabb` (a = first word of its pair). All five are equally frequent, so the
majority word of every pair has probability 0.6 on its own, and the five majority words together are wrong: a decoder that picks
words without looking at each other loses the answer, one that is sure of each word before it keeps it does not.
"""

import os
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from workers.errors import InputError

NAMES = ("Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Zoe", "Max", "Ida")
ITEMS = ("pens", "cups", "nuts", "eggs", "keys", "maps", "hats", "figs", "bags", "toys")
NUM_DIGITS = 3
PHRASE_REQUEST = " Describe the box first."
PHRASE_PAIRS = (("Big", "Small"), ("red", "blue"), ("new", "old"), ("light", "heavy"), ("round", "square"))
PHRASE_PATTERNS = ("aaabb", "aabba", "abbaa", "bbaaa", "baaab")

_PROMPT = re.compile(
    rf"(?P<name>[A-Z][a-z]+) packs (?P<first>[1-9]\d{{{NUM_DIGITS - 1}}}) (?P<item>[a-z]+) and "
    rf"(?P<second>[1-9]\d{{{NUM_DIGITS - 1}}}) more\. How many\?(?P<phrase>{re.escape(PHRASE_REQUEST)})?"
)
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_SCHEMA = pa.schema([("id", pa.int64()), ("messages", pa.list_(_MESSAGE))])


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is valid, and why not. `reason` is `ok` or names the first part that is wrong."""

    is_valid: bool
    reason: str


@dataclass(frozen=True)
class Problem:
    """One prompt in parts. `has_phrase`: the box is to be described first."""

    name: str
    item: str
    first: int
    second: int
    has_phrase: bool

    @property
    def pair(self) -> tuple[int, int]:
        """The operands without their order."""
        return min(self.first, self.second), max(self.first, self.second)

    def prompt(self) -> str:
        """The user turn."""
        request = PHRASE_REQUEST if self.has_phrase else ""
        return f"{self.name} packs {self.first} {self.item} and {self.second} more. How many?{request}"

    def work(self) -> list[str]:
        """The lines of the answer that follow from the prompt: one per digit, then the total."""
        lines, carry = [], 0
        for place in range(NUM_DIGITS):
            a, b = self.first // 10**place % 10, self.second // 10**place % 10
            lines.append(f"{a}+{b}+{carry}={a + b + carry:02d}")
            carry = (a + b + carry) // 10
        return [*lines, f"Total {self.first + self.second}."]

    def answer(self, pattern: str) -> str:
        """A valid assistant turn; `pattern` chooses the phrase when the prompt asks for one."""
        return "\n".join(([phrase(pattern)] if self.has_phrase else []) + self.work())


@dataclass(frozen=True)
class QuickstartData:
    """What `write_quickstart_data` wrote. `num_shared_pairs` counts held-out operand pairs that occur in training: always 0."""

    train_paths: tuple[str, ...]
    heldout_paths: tuple[str, ...]
    num_train_rows: int
    num_heldout_rows: int
    num_heldout_phrases: int
    num_shared_pairs: int


def phrase(pattern: str) -> str:
    """The description of the box for a pattern such as `aabba`."""
    words = [pair["ab".index(letter)] for pair, letter in zip(PHRASE_PAIRS, pattern, strict=True)]
    return " ".join(words) + " box."


_VALID_PHRASES = frozenset(phrase(pattern) for pattern in PHRASE_PATTERNS)


def parse_prompt(text: str) -> Problem:
    """Reads a prompt of this task back into its parts; InputError for any other text."""
    match = _PROMPT.fullmatch(text.strip())
    if match is None:
        raise InputError("prompt", repr(text[:80]), "a prompt of the quickstart task", "Validate only its own answers.")
    return Problem(match["name"], match["item"], int(match["first"]), int(match["second"]), match["phrase"] is not None)


def validate_answer(prompt: str | Mapping[str, Any], answer: str) -> Verdict:
    """Checks one answer line by line; a wrong intermediate result or phrase counts as wrong, as does anything missing or extra.

    Args:
        prompt: the text of the user turn, or a row with `messages` (the last user turn counts) or `prompt`.
        answer: the text of the assistant turn, without its end token.

    Raises:
        InputError: the prompt is not one of this task.
    """
    problem = parse_prompt(prompt if isinstance(prompt, str) else _prompt_text(prompt))
    lines = answer.strip().split("\n")
    if problem.has_phrase:
        if lines[0] not in _VALID_PHRASES:
            return Verdict(False, "phrase")
        lines = lines[1:]
    names = [f"digit {place + 1}" for place in range(NUM_DIGITS)] + ["total"]
    expected = problem.work()
    for index, name in enumerate(names):
        if index >= len(lines) or lines[index] != expected[index]:
            return Verdict(False, name)
    return Verdict(True, "ok") if len(lines) == len(expected) else Verdict(False, "extra text")


def generate_problems(
    seed: int, num_rows: int, phrase_share: float, *, excluded: frozenset[tuple[int, int]]
) -> Iterator[Problem]:
    """Random problems whose operand pairs, in either order, are not `excluded`; exactly round(share * rows) ask for a phrase."""
    rng = random.Random(seed)
    has_phrase = [index < round(phrase_share * num_rows) for index in range(num_rows)]
    rng.shuffle(has_phrase)
    low, high = 10 ** (NUM_DIGITS - 1), 10**NUM_DIGITS
    for wants_phrase in has_phrase:
        while True:
            problem = Problem(
                rng.choice(NAMES), rng.choice(ITEMS), rng.randrange(low, high), rng.randrange(low, high), wants_phrase
            )
            if problem.pair not in excluded:
                break
        yield problem


def generate_rows(
    seed: int, num_train_rows: int, num_heldout_rows: int, phrase_share: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows (`id`, `messages` with the answer) and held-out rows (`id`, `messages` without); no pair is in both."""
    heldout = list(generate_problems(2 * seed + 1, num_heldout_rows, phrase_share, excluded=frozenset()))
    excluded = frozenset(problem.pair for problem in heldout)
    rng = random.Random(f"phrases {seed}")
    train_rows = []
    for index, problem in enumerate(generate_problems(2 * seed, num_train_rows, phrase_share, excluded=excluded)):
        answer = problem.answer(rng.choice(PHRASE_PATTERNS))
        train_rows.append(
            {"id": index, "messages": [_message("user", problem.prompt()), _message("assistant", answer)]}
        )
    heldout_rows = [{"id": i, "messages": [_message("user", problem.prompt())]} for i, problem in enumerate(heldout)]
    return train_rows, heldout_rows


def write_quickstart_data(
    folder: str | Path,
    seed: int,
    *,
    num_train_rows: int = 16384,
    num_heldout_rows: int = 256,
    phrase_share: float = 0.4,
    num_train_shards: int = 4,
) -> QuickstartData:
    """Writes `train/part-*.parquet` and `heldout/part-*.parquet`; each file appears whole. Same arguments, same rows.

    Raises:
        InputError: a size that makes no sense.
    """
    if num_train_shards < 1 or num_train_rows < num_train_shards or num_heldout_rows < 1 or not 0 <= phrase_share <= 1:
        found = f"{num_train_rows} train rows in {num_train_shards} shards, {num_heldout_rows} held-out, share {phrase_share}"
        raise InputError("quickstart data", found, "at least one row per shard and a share in [0, 1]")
    train_rows, heldout_rows = generate_rows(seed, num_train_rows, num_heldout_rows, phrase_share)
    heldout = [parse_prompt(_prompt_text(row)) for row in heldout_rows]
    train_pairs = {parse_prompt(_prompt_text(row)).pair for row in train_rows}
    num_shared_pairs = len(train_pairs & {problem.pair for problem in heldout})
    assert num_shared_pairs == 0, f"{num_shared_pairs} held-out operand pairs occur in training"
    cuts = [num_train_rows * shard // num_train_shards for shard in range(num_train_shards + 1)]
    return QuickstartData(
        train_paths=tuple(
            _write_shard(Path(folder) / "train" / f"part-{shard:05d}.parquet", train_rows[start:end])
            for shard, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False))
        ),
        heldout_paths=(_write_shard(Path(folder) / "heldout" / "part-00000.parquet", heldout_rows),),
        num_train_rows=len(train_rows),
        num_heldout_rows=len(heldout_rows),
        num_heldout_phrases=sum(problem.has_phrase for problem in heldout),
        num_shared_pairs=num_shared_pairs,
    )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _prompt_text(row: Mapping[str, Any]) -> str:
    """The text of the user turn that a row ends with."""
    if "messages" not in row:
        if "prompt" not in row:
            raise InputError("row", f"columns {sorted(row)}", "`messages` or `prompt`")
        return str(row["prompt"])
    turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
    if not turns:
        raise InputError("messages", "no user turn", "a prompt of the quickstart task")
    return str(turns[-1])


def _write_shard(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), unfinished)
    os.replace(unfinished, path)
    return str(path)
