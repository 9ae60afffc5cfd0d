"""The tasks that prepare shards: a whole shard each, or some row groups of a large Parquet file.

How a shard is cut depends on the shard alone. A task writes files that are a function of its rows and the settings, each as a
whole, and its `done` record last: to run it again does no harm.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray.data

from pipelines import storage
from pipelines.model_folders import fetch_facts
from pipelines.row_files import RowRange, row_ranges
from pipelines.sft_rows import PartWriter, RejectedWriter, encode_row
from pipelines.sft_source import NUM_INSPECTION_THREADS, MalformedLine, Shard, iterate_rows
from workers.chat import MALFORMED_LINE, NOT_UTF_8, UNREADABLE_ROW, Rejected
from workers.config import DataSettings
from workers.errors import InputError

# About a minute of tokenizing on one core; goes with `PREPARATION_VERSION`, since files are named by tasks. JSONL is not cut: its
# rows are numbered by lines, which nobody has counted before.
TASK_BYTES = 64 << 20


@dataclass(frozen=True)
class Preparation:
    """All that a task needs to know, the same for every shard."""

    settings: DataSettings
    tokenizer_folder: str
    mask_token_id: int | None
    end_ids: frozenset[int]
    output: str


@dataclass(frozen=True)
class Task:
    """The rows `rows` (None: all) of the shard with number `file`; `number` counts the tasks of that shard."""

    file: int
    number: int
    shard: Shard
    rows: RowRange | None

    @property
    def name(self) -> str:
        """How the names of its files begin; sorted by it, they are in the order of the rows."""
        return f"{self.file:05d}-{self.number:05d}"


def cut_shards(shards: Sequence[Shard]) -> list[Task]:
    """The tasks of all shards, in the order of their rows.

    Raises:
        InputError: a large Parquet file is damaged.
    """
    with ThreadPoolExecutor(NUM_INSPECTION_THREADS) as pool:
        ranges = pool.map(_ranges_of, shards)
        return [
            Task(file, number, shard, rows)
            for file, (shard, cuts) in enumerate(zip(shards, ranges, strict=True))
            for number, rows in enumerate(cuts)
        ]


def _ranges_of(shard: Shard) -> Sequence[RowRange | None]:
    return row_ranges(shard, TASK_BYTES) if shard.is_parquet and shard.size > TASK_BYTES else [None]


def done_records(output: str) -> dict[str, dict[str, Any]]:
    """What became of the tasks that are done, by name."""
    records = {}
    for info in storage.list_folder(storage.join(output, "done")):
        record = json.loads(storage.read_bytes(info.path))
        records[record["task"]] = record
    return records


def run_tasks(preparation: Preparation, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    """Runs the tasks with Ray Data and yields the `done` record of each as it ends.

    Raises:
        InputError: a shard is damaged, gone, or has changed.
    """
    if not tasks:
        return
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    items = [{"task": number} for number in range(len(tasks))]
    run = functools.partial(_run_task, tasks=list(tasks), preparation=preparation)
    with ray.data.DataContext.current(context):
        # One block per task: Ray runs a whole block at once.
        for answer in ray.data.from_items(items, override_num_blocks=len(items)).map(run).iter_rows():
            if answer["error"]:
                # Given back as data: Ray Data would wrap an exception, and would try the same bad file again.
                raise InputError(*json.loads(answer["error"]))
            yield json.loads(answer["record"])


def _run_task(item: dict[str, Any], tasks: list[Task], preparation: Preparation) -> dict[str, Any]:
    try:
        record = write_rows(tasks[item["task"]], preparation)
    except InputError as error:
        return {"record": "", "error": json.dumps(error.args)}
    return {"record": json.dumps(record), "error": ""}


def write_rows(task: Task, preparation: Preparation) -> dict[str, Any]:
    """Prepares the rows of one task. Streams, so memory is bounded by one part.

    Raises:
        InputError: as `run_tasks`.
    """
    pa.set_cpu_count(1)
    tokenizer = load_tokenizer(fetch_facts(preparation.tokenizer_folder))
    settings, shard = preparation.settings, task.shard
    reasons: Counter[str] = Counter()
    with (
        PartWriter(storage.join(preparation.output, "parts"), task.name, task.file) as parts,
        RejectedWriter(storage.join(preparation.output, "rejected"), task.name, shard) as rejected,
    ):
        for number, row in iterate_rows(shard, settings, task.rows):
            try:
                if isinstance(row, MalformedLine):
                    kind = MALFORMED_LINE if row.is_utf8 else NOT_UTF_8
                    raise Rejected(UNREADABLE_ROW if shard.is_parquet else kind, row.detail)
                conversation = encode_row(
                    tokenizer, row, settings, mask_token_id=preparation.mask_token_id, end_ids=preparation.end_ids
                )
            except Rejected as verdict:
                reasons[verdict.reason] += 1
                rejected.add(number, verdict)
            else:
                parts.add(number, conversation)
    found = storage.find_file(shard.path)
    if found is None or (found.size, found.version) != (shard.size, shard.version):
        raise InputError(shard.path, "a shard that changed while it was read", "input that stays the same during a run")
    record = {"task": task.name, "file": task.file, "parts": parts.written, "reasons": dict(reasons)}
    storage.publish_bytes(storage.join(preparation.output, "done", f"{task.name}.json"), json.dumps(record).encode())
    return record


@functools.cache
def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a folder, loaded once in a process."""
    from workers.models import folder as model_folder

    return model_folder.load_tokenizer(folder)
