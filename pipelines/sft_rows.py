"""One raw row to token ids, and the files of prepared and of rejected rows."""

import os
import tempfile
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from pipelines.row_files import RowFile
from workers.chat import (
    MASK_AMONG_TOKENS,
    MISSING_COLUMN,
    Conversation,
    Rejected,
    encode_conversation,
    encode_pair,
    fit_to_length,
)
from workers.config import DataSettings

PART_ROWS = 4096
PART_TOKENS = 4 << 20  # bounds the memory of a task when rows are long
MAX_DETAIL = 500  # characters: a role can be as long as a line
PART_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("starts", pa.list_(pa.int32())),
        ("ends", pa.list_(pa.int32())),
    ]
)
# `row` counts from 0; `location` says the same as messages do, with the line from 1 in JSONL.
REJECTED_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("row", pa.int64()),
        ("location", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)


def encode_row(
    tokenizer: Any,
    row: dict[str, Any],
    settings: DataSettings,
    *,
    mask_token_id: int | None,
    end_ids: frozenset[int],
) -> Conversation:
    """A row with messages, or (without, or with null there) with a prompt and a response, as at most `max_length` tokens.

    Raises:
        Rejected: the row cannot be used.
    """
    has_pair = settings.prompt_column in row and settings.response_column in row
    messages = row.get(settings.messages_column)
    # Files of both kinds that were merged have all columns, and nulls in those that a row did not have.
    if messages is not None or (settings.messages_column in row and not has_pair):
        conversation = encode_conversation(
            tokenizer, messages, end_ids=end_ids, allow_empty_answer=settings.allow_empty_answer
        )
    elif has_pair:
        conversation = encode_pair(
            tokenizer,
            row[settings.prompt_column],
            row[settings.response_column],
            prompt_format=settings.prompt_format,
            end_ids=end_ids,
            allow_empty_answer=settings.allow_empty_answer,
        )
    else:
        raise Rejected(MISSING_COLUMN, f"the row has {', '.join(row) or 'none of the columns'}")
    conversation = fit_to_length(conversation, settings.max_length, settings.too_long)
    if mask_token_id is not None and mask_token_id in conversation.token_ids:
        raise Rejected(MASK_AMONG_TOKENS, f"id {mask_token_id} at token {conversation.token_ids.index(mask_token_id)}")
    return conversation


class PartWriter:
    """Writes good rows of one shard as parts of bounded size, `{name}-{k}.parquet`; `written` lists them with their counts."""

    def __init__(self, folder: str, name: str, file: int) -> None:
        self._folder, self._name, self._file = folder, name, file
        self._rows: list[dict[str, Any]] = []
        self._num_tokens = 0
        self.written: list[dict[str, Any]] = []

    def add(self, row: int, conversation: Conversation) -> None:
        """Takes the next row, numbered as in the shard."""
        starts, ends = zip(*conversation.responses, strict=True)
        token_ids = np.array(conversation.token_ids, np.int32)  # a ninth of the memory of a list
        self._rows.append({"file": self._file, "row": row, "token_ids": token_ids, "starts": starts, "ends": ends})
        self._num_tokens += len(conversation.token_ids)
        if len(self._rows) >= PART_ROWS or self._num_tokens >= PART_TOKENS:
            self._flush()

    def _flush(self) -> None:
        name = f"{self._name}-{len(self.written):05d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(self._rows, schema=PART_SCHEMA), sink, compression="zstd")
        storage.publish_bytes(storage.join(self._folder, name), sink.getvalue().to_pybytes())
        num_response_tokens = sum(sum(row["ends"]) - sum(row["starts"]) for row in self._rows)
        self.written.append(
            {
                "path": name,
                "file": self._file,
                "num_rows": len(self._rows),
                "num_tokens": self._num_tokens,
                "num_response_tokens": num_response_tokens,
            }
        )
        self._rows, self._num_tokens = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._rows:
            self._flush()


class RejectedWriter:
    """Writes rejected rows of one shard as one file, through a local temporary file; no rejected row, no file."""

    def __init__(self, folder: str, name: str, shard: RowFile) -> None:
        self._path = storage.join(folder, f"{name}.parquet")
        self._shard = shard
        self._rows: list[dict[str, Any]] = []
        self._temporary: str | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, row: int, verdict: Rejected) -> None:
        """Takes the next rejected row, numbered as in the shard."""
        # Half surrogates can reach the detail, and Parquet takes none.
        detail = verdict.detail[:MAX_DETAIL].encode(errors="backslashreplace").decode()
        self._rows.append(
            {
                "path": self._shard.path,
                "row": row,
                "location": self._shard.location(row),
                "reason": verdict.reason,
                "detail": detail,
            }
        )
        if len(self._rows) >= PART_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            handle, self._temporary = tempfile.mkstemp(prefix="marsray-rejected-", suffix=".parquet")
            os.close(handle)
            self._writer = pq.ParquetWriter(self._temporary, REJECTED_SCHEMA)
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=REJECTED_SCHEMA))
        self._rows = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._rows:
            self._flush()
        if self._writer is None or self._temporary is None:
            return
        self._writer.close()
        if error is None:
            storage.publish_file(self._temporary, self._path)
        os.remove(self._temporary)
