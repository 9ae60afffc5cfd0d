"""Ray Train's list of checkpoints survives a kill in the middle of its writing. The rest is in `test_training_kills`."""

import json
from pathlib import Path

import pytest

from pipelines.checkpoint_store import keep_books, mend_books

WHOLE, NEWER = json.dumps({"checkpoint_results": ["step-2"]}), json.dumps({"checkpoint_results": ["step-4"]})


@pytest.mark.parametrize("length", range(0, len(NEWER)))
def test_a_list_that_was_cut_short_is_the_one_before(length: int, tmp_path: Path) -> None:
    books = tmp_path / "checkpoint_manager_snapshot.json"
    books.write_text(WHOLE)
    keep_books(tmp_path)
    books.write_text(NEWER[:length])
    mend_books(str(tmp_path))
    assert books.read_text() == WHOLE


def test_a_whole_list_stays_and_a_first_one_that_was_cut_short_is_none(tmp_path: Path) -> None:
    mend_books(str(tmp_path / "nothing_yet"))
    books = tmp_path / "checkpoint_manager_snapshot.json"
    keep_books(tmp_path)
    books.write_text(NEWER[:5])
    mend_books(str(tmp_path))
    assert not books.exists()
    books.write_text(WHOLE)
    keep_books(tmp_path)
    books.write_text(NEWER)
    mend_books(str(tmp_path))
    assert books.read_text() == NEWER
