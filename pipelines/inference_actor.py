"""What runs inside one actor of the pool: a model, a decoding engine, and the units that are decoded on it at the moment.

The methods are coroutines that share one engine: while one unit waits for its last rows, the next one has its rows in the engine
already, so the slots stay full across units.
"""

import asyncio
import io
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from pipelines.manifest import UnitEntry, publish_entry
from pipelines.model_folders import fetch
from pipelines.pool_usage import Work
from pipelines.row_requests import RequestBuilder, RowFault
from pipelines.work_units import UnitRows
from workers.config import DecodingSettings, PromptFormat, PromptSettings, RowDecodingSettings

if TYPE_CHECKING:
    from workers.decoding.async_engine import AsyncEngine
    from workers.decoding.request import Result
    from workers.decoding.statistics import RunStatistics

ERROR_FIELDS = (("error_code", pa.string()), ("message", pa.string()), ("location", pa.string()))


@dataclass(frozen=True)
class ModelSetup:
    """What an actor loads, known before it does: `folder` is local or on S3, `block_size` 1 for a model without placeholders."""

    folder: str
    mask_token_id: int
    block_size: int
    prompt_format: PromptFormat
    end_ids: frozenset[int]
    uses_gpu: bool


@dataclass(frozen=True)
class OutputTask:
    """Where the answers of a unit go, and how its rows are decoded."""

    output: str
    prompts: PromptSettings
    decoding: RowDecodingSettings
    id_type: pa.DataType
    extra: pa.Schema

    def result_schema(self) -> pa.Schema:
        """Of `part-*.parquet`."""
        fields = [
            ("id", self.id_type),
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("finish_reason", pa.string()),
            ("num_prompt_tokens", pa.int32()),
            ("num_generated_tokens", pa.int32()),
            ("num_forwards", pa.int32()),
            ("forwards_per_window", pa.map_(pa.string(), pa.int32())),
        ]
        if self.decoding.logprobs:
            fields.append(("logprobs", pa.list_(pa.float32())))
        return pa.schema([*pa.schema(fields), *self.extra])

    def error_schema(self) -> pa.Schema:
        """Of `_errors/part-*.parquet`; the id is null for a line that could not be read."""
        return pa.schema([("id", self.id_type), *ERROR_FIELDS])


class InferenceActor:
    """Loads a model once and decodes units with it."""

    def __init__(self, setup: ModelSetup, decoding: DecodingSettings) -> None:
        self._setup, self._decoding = setup, decoding
        self._engine: AsyncEngine | None = None
        self._tokenizer: Any = None
        self._statistics: RunStatistics | None = None
        self._num_advances = 0

    async def place(self) -> None:
        """Answers as soon as there is a process."""

    async def look(self) -> Work:
        """What has been done since the model was loaded."""
        counts = self._statistics
        if counts is None:
            return Work()
        return Work(
            num_advances=self._num_advances + counts.num_model_calls,
            busy_seconds=counts.model_seconds + counts.engine_seconds,
            num_slot_steps=counts.num_slot_steps,
            num_slots_in_use=counts.num_slots_in_use,
        )

    async def load(self) -> float:
        """Loads model and tokenizer; returns the seconds that took.

        Raises:
            InputError: the folder is no model that this engine can run, or runs rightly, or the cache does not fit.
        """
        import torch

        from workers.decoding.async_engine import AsyncEngine
        from workers.decoding.engine import DecodingEngine
        from workers.models.folder import load_tokenizer
        from workers.models.loading import load_causal_lm

        started = time.monotonic()
        if not self._setup.uses_gpu:
            torch.set_num_threads(1)
        device = torch.device("cuda" if self._setup.uses_gpu else "cpu")
        folder = fetch(self._setup.folder)
        model = load_causal_lm(folder, dtype=torch.bfloat16 if self._setup.uses_gpu else torch.float32)
        self._tokenizer = load_tokenizer(folder)
        engine = DecodingEngine(
            model.to(device),
            self._tokenizer,
            mask_token_id=self._setup.mask_token_id,
            end_ids=self._setup.end_ids,
            block_size=self._setup.block_size,
            num_slots=self._decoding.num_slots,
            max_length=self._decoding.max_length,
            cache=self._decoding.cache,
            cache_block=self._decoding.cache_block,
            prefill_chunk=self._decoding.prefill_chunk,
            run_seed=self._decoding.seed or 0,
        )
        engine.check(model)
        self._engine, self._statistics = AsyncEngine(engine), engine.statistics
        return time.monotonic() - started

    async def decode_unit(self, task: OutputTask, unit_rows: UnitRows) -> UnitEntry:
        """Decodes the rows of one unit and publishes its two files, then its manifest entry."""
        outcomes = await self._decode(task, unit_rows)
        self._num_advances += 1
        # In a thread, so that the engine goes on with the rows of the next unit.
        return await asyncio.to_thread(_publish, task, unit_rows, outcomes)

    async def _decode(self, task: OutputTask, unit_rows: UnitRows) -> dict[int, "Result | RowFault"]:
        """The outcome of each row by its place in the unit."""
        engine = self._engine
        assert engine is not None, "load() comes first"
        builder = RequestBuilder(
            self._tokenizer,
            end_ids=self._setup.end_ids,
            prompt_format=self._setup.prompt_format,
            prompts=task.prompts,
            decoding=task.decoding,
        )
        # In a thread, so that the engine goes on with the rows of other units.
        built = await asyncio.to_thread(lambda: [builder.build(row) for row in unit_rows.rows])
        self._num_advances += 1
        requests = [request for request in built if not isinstance(request, RowFault)]
        results = iter(await asyncio.gather(*map(engine.generate, requests)))
        return {
            place: request if isinstance(request, RowFault) else next(results) for place, request in enumerate(built)
        }


def _publish(task: OutputTask, unit_rows: UnitRows, outcomes: dict[int, "Result | RowFault"]) -> UnitEntry:
    """Writes the part and the error file of a unit, both always, rows in the order of the input; then the manifest entry."""
    results: list[tuple[int, Result]] = []
    errors: list[dict[str, Any]] = []
    for place, row in enumerate(unit_rows.rows):
        outcome = outcomes[place]
        fault = outcome if isinstance(outcome, RowFault) else outcome.error
        if fault is not None:
            message = fault.message.encode(errors="backslashreplace").decode()
            errors.append({"id": row.id, "error_code": fault.code, "message": message, "location": row.location})
        else:
            assert not isinstance(outcome, RowFault)
            results.append((place, outcome))
    rows = [_result_row(unit_rows.rows[place].id, result) for place, result in results]
    schema = task.result_schema()
    own_schema = pa.schema([field for field in schema if field.name not in task.extra.names])
    columns = pa.Table.from_pylist(rows, schema=own_schema).columns
    if task.extra.names:
        columns += unit_rows.extra.take([place for place, _ in results]).columns
    _write(f"part-{unit_rows.unit.name}.parquet", task.output, pa.Table.from_arrays(columns, schema=schema))
    error_table = pa.Table.from_pylist(errors, schema=task.error_schema())
    _write(f"part-{unit_rows.unit.name}.parquet", storage.join(task.output, "_errors"), error_table)
    entry = UnitEntry(
        unit=unit_rows.unit.name,
        num_rows=len(unit_rows.rows),
        num_results=len(results),
        errors=dict(Counter(error["error_code"] for error in errors)),
        num_prompt_tokens=sum(result.num_prompt_tokens for _, result in results),
        num_generated_tokens=sum(len(result.token_ids) for _, result in results),
        num_forwards=sum(result.num_forwards for _, result in results),
        num_query_tokens=sum(result.num_query_tokens for _, result in results),
        kept_per_forward=_sorted_sum(result.kept_per_forward for _, result in results),
        forwards_per_window=_sorted_sum(result.forwards_per_window for _, result in results),
    )
    publish_entry(task.output, entry)
    return entry


def _result_row(row_id: str | int | None, result: "Result") -> dict[str, Any]:
    return {
        "id": row_id,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_generated_tokens": len(result.token_ids),
        "num_forwards": result.num_forwards,
        "logprobs": result.logprobs,
        "forwards_per_window": list(result.forwards_per_window.items()),
    }


def _sorted_sum(histograms: Iterable[Counter[int] | Counter[str]]) -> dict[str, int]:
    """The sum of histograms; the keys are strings, as in the JSON of an entry."""
    counts: Counter[str] = Counter()
    for histogram in histograms:
        counts.update({str(key): count for key, count in histogram.items()})
    return {key: counts[key] for key in sorted(counts, key=lambda key: (int(key.split("+")[0]), key))}


def _write(name: str, folder: str, table: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    storage.publish_bytes(storage.join(folder, name), sink.getvalue())
