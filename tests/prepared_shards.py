"""Preparation of raw shards in this process, task by task, as the cluster does it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from chat_tokenizers import END_ID, MASK_ID

from pipelines.preparation_tasks import Preparation, cut_shards, write_rows
from pipelines.sft_source import inspect_shards
from workers.config import DataSettings

ENDS = frozenset([END_ID])


def turns(question: Any, answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, rows: list[Any]) -> None:
    """JSON lines; a row that is text stands as it is."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def prepare_here(
    folder: Path, tokenizer_folder: str, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The prepared and the rejected rows of the shards in `folder/in`, in order; the files go to `folder/out`."""
    settings = DataSettings(train=(str(folder / "in"),), **options)
    preparation = Preparation(settings, tokenizer_folder, MASK_ID, ENDS, str(folder / "out"))
    for task in cut_shards(inspect_shards(settings)):
        write_rows(task, preparation)
    return _rows(folder / "out" / "parts"), _rows(folder / "out" / "rejected")


def _rows(folder: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    return pa.concat_tables(tables).to_pylist() if tables else []
