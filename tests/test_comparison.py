"""A share of the rows is decoded a second time, one token per forward: which rows, what is counted, and what stays the same."""

import re
from dataclasses import asdict
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_pool import KilledError, run_locally
from prompt_files import make_model_folder, write_jsonl

from pipelines.comparison import Comparison, compare, is_compared
from workers.config import DecodingSettings, GenerateRecipe, PromptSettings

NUM_ROWS = 30


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_share_of_the_rows_is_compared_whatever_their_ids(share: float) -> None:
    for ids in (range(20_000), [f"row {i}" for i in range(20_000)]):
        num_compared = sum(is_compared(row, share) for row in ids)
        assert num_compared == pytest.approx(20_000 * share, abs=4 * (20_000 * share * (1 - share)) ** 0.5)
    assert all(is_compared(row, 0.5) for row in range(1000) if is_compared(row, 0.2))


TOKENS = st.lists(st.integers(0, 2), max_size=5)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=8), st.integers(0, 8))
def test_agreement_is_counted_row_by_row_and_adds_up(pairs: list[tuple[list[int], list[int]]], cut: int) -> None:
    rows = [(f"row {number}", *pair) for number, pair in enumerate(pairs)]
    total = compare(rows)
    assert (total.num_rows, total.num_equal_rows) == (len(rows), sum(a == b for a, b in pairs))
    assert total.num_tokens == sum(len(b) for _, b in pairs)
    longest_prefix = [max(n for n in range(6) if a[:n] == b[:n] and n <= min(len(a), len(b))) for a, b in pairs]
    assert total.num_agreeing_tokens == sum(longest_prefix)
    assert total.differing_rows == [name for name, a, b in rows if a != b][:5]
    first = compare(rows[:cut])
    first.add(compare(rows[cut:]))
    assert first == total


def recipe(tmp_path: Path, share: float, output: str = "out", **decoding: object) -> GenerateRecipe:
    if not (tmp_path / "model").exists():
        make_model_folder(tmp_path / "model")
    rows = [{"id": i, "prompt": f"Say {i}."} for i in range(NUM_ROWS)]
    rows[4]["mode"] = "one_token"  # type: ignore[assignment]
    settings = {"max_new_tokens": 6, "num_slots": 8, "temperature": 1.0, **decoding}
    return GenerateRecipe(
        model=str(tmp_path / "model"),
        prompts=PromptSettings(paths=(str(write_jsonl(tmp_path / "in.jsonl", rows)),), rows_per_unit=8),
        output=str(tmp_path / output),
        decoding=DecodingSettings(**settings),  # type: ignore[arg-type]
        compare_with_one_token=share,
    )


def test_verified_rows_agree_and_their_answers_are_those_without_a_comparison(tmp_path: Path) -> None:
    plain, _ = run_locally(recipe(tmp_path, 0.0, output="plain"))
    report, _ = run_locally(recipe(tmp_path, 0.5))
    tables = [ds.dataset(tmp_path / name).to_table() for name in ("plain", "out")]
    assert tables[0]["token_ids"] == tables[1]["token_ids"] and tables[0]["id"] == tables[1]["id"]
    compared = [row for row in range(NUM_ROWS) if is_compared(row, 0.5) and row != 4]
    comparison = Comparison(**report.comparison)
    assert comparison.num_rows == comparison.num_equal_rows == len(compared) > 5
    assert comparison.num_agreeing_tokens == comparison.num_tokens > 0 and comparison.differing_rows == []
    counts = ("num_rows", "num_results", "num_generated_tokens", "num_prompt_tokens")
    assert [getattr(report, name) for name in counts] == [getattr(plain, name) for name in counts]
    assert re.search(r"of these the same +1\.000", report.table())
    assert plain.comparison == asdict(Comparison())
    assert "compared" not in plain.table()


def test_lossy_rows_differ_and_a_resumed_job_compares_the_same_rows(tmp_path: Path) -> None:
    job = recipe(tmp_path, 1.0, mode="tau", threshold=0.0)
    with pytest.raises(KilledError):
        run_locally(job, dies_at=2)
    report, _ = run_locally(job)
    comparison = Comparison(**report.comparison)
    assert comparison.num_rows == NUM_ROWS - 1 and comparison.num_equal_rows < comparison.num_rows
    assert comparison.num_agreeing_tokens < comparison.num_tokens
    assert all(name.startswith(f"{tmp_path}/in.jsonl line ") for name in comparison.differing_rows)
    whole, _ = run_locally(recipe(tmp_path, 1.0, output="whole", mode="tau", threshold=0.0))
    assert whole.comparison == report.comparison
