"""Prompt shards and a model folder for tests of batch inference: random weights, no downloads."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.quickstart_task import generate_rows
from pipelines.tokenizer_training import create_model_folder, train_tokenizer
from workers.config import FromScratch
from workers.models.folder import MultiTokenSettings, write_multi_token_settings

BLOCK_SIZE = 4


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def write_jsonl(path: Path, rows: Iterable[Any], *, compression: str | None = None) -> Path:
    """Rows that are bytes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    with pa.output_stream(str(path), compression=compression) as stream:
        stream.write(data)
    return path


def make_model_folder(folder: Path) -> str:
    """A Llama of a few thousand random weights with the quickstart's tokenizer and chat template."""
    train_rows, _ = generate_rows(0, 200, 1, 0.4)
    texts = (message["content"] for row in train_rows for message in row["messages"])
    tokenizer = train_tokenizer(texts, vocab_size=320, max_positions=256)
    settings = FromScratch(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        max_positions=256,
    )
    create_model_folder(settings, tokenizer, folder, seed=0)
    write_multi_token_settings(
        MultiTokenSettings(tokenizer.mask_token_id, BLOCK_SIZE, prompt_format="chat", objective="mars"), folder
    )
    return str(folder)
