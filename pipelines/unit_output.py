"""What becomes of a decoded unit: a part of answers, a part of errors, and the counts of its manifest entry."""

import io
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import storage
from pipelines.comparison import compare
from pipelines.manifest import UnitEntry, publish_entry
from pipelines.row_requests import RowFault
from pipelines.top_rows import RowFigures, longest, slowest
from pipelines.work_units import UnitRows
from workers.config import PromptSettings, RowDecodingSettings

if TYPE_CHECKING:
    from workers.decoding.request import Result

ERROR_FIELDS = (("error_code", pa.string()), ("message", pa.string()), ("location", pa.string()))


@dataclass(frozen=True)
class Answer:
    """What the engine made of a row.

    Attributes:
        result: tokens, or an error.
        seconds: from its first tokens to its last.
        one_token: the tokens of one-token decoding, for a row that is compared.
    """

    result: "Result"
    seconds: float
    one_token: tuple[int, ...] | None = None


@dataclass(frozen=True)
class OutputTask:
    """Where the answers of a unit go, and how its rows are decoded."""

    output: str
    prompts: PromptSettings
    decoding: RowDecodingSettings
    id_type: pa.DataType
    extra: pa.Schema
    compared_share: float = 0.0

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


def publish_unit(task: OutputTask, unit_rows: UnitRows, outcomes: Mapping[int, Answer | RowFault]) -> UnitEntry:
    """Writes the part and the error file of a unit, both always, rows in the order of the input; then the manifest entry."""
    answers: list[tuple[int, Answer]] = []
    errors: list[dict[str, Any]] = []
    for place, row in enumerate(unit_rows.rows):
        outcome = outcomes[place]
        fault = outcome if isinstance(outcome, RowFault) else outcome.result.error
        if fault is not None:
            message = fault.message.encode(errors="backslashreplace").decode()
            errors.append({"id": row.id, "error_code": fault.code, "message": message, "location": row.location})
        else:
            assert not isinstance(outcome, RowFault)
            answers.append((place, outcome))
    _write_answers(task, unit_rows, answers)
    error_table = pa.Table.from_pylist(errors, schema=task.error_schema())
    _write(f"part-{unit_rows.unit.name}.parquet", storage.join(task.output, "_errors"), error_table)
    entry = _entry(unit_rows, answers, Counter(error["error_code"] for error in errors))
    publish_entry(task.output, entry)
    return entry


def _write_answers(task: OutputTask, unit_rows: UnitRows, answers: list[tuple[int, Answer]]) -> None:
    rows = [_result_row(unit_rows.rows[place].id, answer.result) for place, answer in answers]
    schema = task.result_schema()
    own_schema = pa.schema([field for field in schema if field.name not in task.extra.names])
    columns = pa.Table.from_pylist(rows, schema=own_schema).columns
    if task.extra.names:
        columns += unit_rows.extra.take([place for place, _ in answers]).columns
    _write(f"part-{unit_rows.unit.name}.parquet", task.output, pa.Table.from_arrays(columns, schema=schema))


def _entry(unit_rows: UnitRows, answers: list[tuple[int, Answer]], errors: Counter[str]) -> UnitEntry:
    results = [answer.result for _, answer in answers]
    figures = [
        RowFigures(
            unit_rows.rows[place].location, answer.seconds, len(answer.result.token_ids), answer.result.num_forwards
        )
        for place, answer in answers
    ]
    return UnitEntry(
        unit=unit_rows.unit.name,
        num_rows=len(unit_rows.rows),
        num_results=len(results),
        errors=dict(errors),
        num_prompt_tokens=sum(result.num_prompt_tokens for result in results),
        num_generated_tokens=sum(len(result.token_ids) for result in results),
        num_forwards=sum(result.num_forwards for result in results),
        num_query_tokens=sum(result.num_query_tokens for result in results),
        kept_per_forward=_sorted_sum(result.kept_per_forward for result in results),
        forwards_per_window=_sorted_sum(result.forwards_per_window for result in results),
        slowest_rows=slowest(figures),
        longest_rows=longest(figures),
        comparison=compare(
            (unit_rows.rows[place].location, answer.result.token_ids, answer.one_token)
            for place, answer in answers
            if answer.one_token is not None
        ),
    )


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
