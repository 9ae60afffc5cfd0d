"""Pins the quickstart's synthetic task: what is valid, how often each phrase occurs, and that no held-out pair is in training."""

import collections
import itertools
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.quickstart_task import (
    PHRASE_PAIRS,
    PHRASE_PATTERNS,
    Problem,
    generate_rows,
    parse_prompt,
    phrase,
    validate_answer,
    write_quickstart_data,
)
from workers.errors import InputError

PROBLEM = Problem("Tom", "pens", 347, 582, has_phrase=False)
ANSWER = "7+2+0=09\n4+8+0=12\n3+5+1=09\nTotal 929."
operands = st.integers(100, 999)


def test_the_example_of_the_module_is_what_the_task_makes() -> None:
    assert PROBLEM.prompt() == "Tom packs 347 pens and 582 more. How many?"
    assert PROBLEM.answer("aaabb") == ANSWER
    assert phrase("aaabb") == "Big red new heavy square box."


@given(operands, operands, st.booleans(), st.sampled_from(PHRASE_PATTERNS))
def test_every_valid_answer_passes_and_the_prompt_reads_back(
    first: int, second: int, has_phrase: bool, pattern: str
) -> None:
    problem = Problem("Eva", "maps", first, second, has_phrase)
    answer = problem.answer(pattern)
    assert parse_prompt(problem.prompt()) == problem
    assert validate_answer(problem.prompt(), answer).is_valid
    assert answer.split("\n")[-1] == f"Total {first + second}."


@given(operands, operands, st.booleans(), st.data())
def test_one_changed_character_anywhere_makes_the_answer_wrong(
    first: int, second: int, has_phrase: bool, data: st.DataObject
) -> None:
    answer = Problem("Eva", "maps", first, second, has_phrase).answer("abbaa")
    place = data.draw(st.integers(0, len(answer) - 1))
    changed = data.draw(st.sampled_from([c for c in "0123456789+=ab." if c != answer[place]]))
    prompt = Problem("Eva", "maps", first, second, has_phrase).prompt()
    assert not validate_answer(prompt, answer[:place] + changed + answer[place + 1 :]).is_valid


def test_exactly_the_five_cyclic_shifts_are_valid_phrases() -> None:
    problem = Problem("Tom", "pens", 347, 582, has_phrase=True)
    assert len({word for pair in PHRASE_PAIRS for word in pair}) == 10
    valid = {
        pattern
        for pattern in map("".join, itertools.product("ab", repeat=5))
        if validate_answer(problem.prompt(), problem.answer(pattern)).is_valid
    }
    assert valid == {"aaabb"[-shift:] + "aaabb"[:-shift] for shift in range(5)} | {"aaabb"}
    assert validate_answer(problem.prompt(), problem.answer("aaaaa")).reason == "phrase"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ANSWER.replace("7+2+0=09", "7+2+0=08"), "digit 1"),
        (ANSWER.replace("3+5+1=09", "3+5+0=08"), "digit 3"),
        (ANSWER.replace("929", "928"), "total"),
        (ANSWER[: ANSWER.index("\nTotal")], "total"),
        (ANSWER + "\nTotal 929.", "extra text"),
        ("", "digit 1"),
        ("Total 929.", "digit 1"),
        (f"{phrase('aaabb')}\n{ANSWER}", "digit 1"),
    ],
)
def test_the_verdict_names_the_first_wrong_part(answer: str, reason: str) -> None:
    """A right total after a wrong intermediate result is still wrong; so is a phrase that nobody asked for."""
    verdict = validate_answer(PROBLEM.prompt(), answer)
    assert (verdict.is_valid, verdict.reason) == (False, reason)


def test_a_row_is_validated_by_its_user_turn() -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": PROBLEM.prompt()}]
    assert validate_answer({"id": 3, "messages": messages}, ANSWER).is_valid
    assert validate_answer({"prompt": PROBLEM.prompt()}, ANSWER).is_valid


@pytest.mark.parametrize("prompt", ["What is 2 + 2?", "", {"text": "x"}, {"messages": []}])
def test_a_prompt_of_another_task_is_refused(prompt: str) -> None:
    with pytest.raises(InputError):
        validate_answer(prompt, ANSWER)


def test_each_phrase_is_as_frequent_as_the_others_and_the_majority_word_has_sixty_percent() -> None:
    train, _ = generate_rows(0, 8000, 16, 0.5)
    firsts = [row["messages"][1]["content"].split("\n")[0] for row in train]
    counts = collections.Counter(line for line in firsts if line.endswith("box."))
    assert sum(counts.values()) == 4000
    assert set(counts) == {phrase(pattern) for pattern in PHRASE_PATTERNS}
    assert all(abs(count - 800) < 120 for count in counts.values())
    for index, (major, _) in enumerate(PHRASE_PAIRS):
        share = sum(count for line, count in counts.items() if line.split()[index] == major) / 4000
        assert abs(share - 0.6) < 0.04


def test_no_held_out_pair_occurs_in_training_in_either_order() -> None:
    """Many rows over few held-out pairs, so that a generator without the exclusion would fail."""
    train, heldout = generate_rows(1, 40000, 2000, 0.4)
    train_pairs = {frozenset((p.first, p.second)) for p in (parse_prompt(r["messages"][0]["content"]) for r in train)}
    heldout_pairs = {
        frozenset((p.first, p.second)) for p in (parse_prompt(r["messages"][0]["content"]) for r in heldout)
    }
    assert not train_pairs & heldout_pairs
    unfiltered, _ = generate_rows(1, 40000, 1, 0.4)
    pairs = {frozenset((p.first, p.second)) for p in (parse_prompt(r["messages"][0]["content"]) for r in unfiltered)}
    assert pairs & heldout_pairs


def test_shards_hold_every_row_once_and_the_same_seed_writes_the_same_rows(tmp_path: Path) -> None:
    data = write_quickstart_data(tmp_path / "a", 5, num_train_rows=103, num_heldout_rows=20, num_train_shards=3)
    again = write_quickstart_data(tmp_path / "b", 5, num_train_rows=103, num_heldout_rows=20, num_train_shards=3)
    other = write_quickstart_data(tmp_path / "c", 6, num_train_rows=103, num_heldout_rows=20, num_train_shards=3)
    rows, rows_again, rows_other = (
        [row for path in result.train_paths for row in pq.read_table(path).to_pylist()]
        for result in (data, again, other)
    )
    heldout = pq.read_table(data.heldout_paths[0]).to_pylist()
    assert [row["id"] for row in rows] == list(range(103))
    assert rows == rows_again != rows_other
    assert all(validate_answer(row, row["messages"][1]["content"]).is_valid for row in rows)
    assert [len(row["messages"]) for row in heldout] == [1] * 20
    assert (data.num_train_rows, data.num_heldout_rows, data.num_heldout_phrases, data.num_shared_pairs) == (
        103,
        20,
        8,
        0,
    )
    files = {path.name for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert files == {f"part-{shard:05d}.parquet" for shard in range(3)}


def test_a_share_above_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="share 1.5"):
        write_quickstart_data(tmp_path, 0, phrase_share=1.5)
