#!/usr/bin/env python3
"""Memory of the input side on N rows and on 10 N: a preparation task, and a training rank with its stream of samples.

Each measurement has a process of its own, so that a peak is that of the work alone. The rows are as long as those of GSM8K:
questions of 25 to 70 words, answers of 30 to 120. Prints a table and, as the last line, one JSON object:

- `rss_ratio_10x_preparation`, `rss_ratio_10x_stream`: peak resident memory on 10 N rows / on N rows;
- `rss_ratio_10x_stream_tasks`: the same for the largest task that reads windows for the rank;
- `preparation_rows_per_second`, `stream_samples_per_second`: on 10 N rows, one core and one rank.

`--quick` takes N = 5,000, otherwise 20,000.
"""

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

import psutil

from pipelines.preparation_tasks import Preparation, cut_shards, write_rows
from pipelines.reports import text_table
from pipelines.sample_order import StreamPlan
from pipelines.sample_stream import rank_steps
from pipelines.sft_data import PreparedIndex, PreparedPart
from pipelines.sft_source import inspect_shards
from pipelines.tokenizer_training import train_tokenizer
from workers.config import DataSettings

NUM_ROWS, QUICK_ROWS, FACTOR = 20_000, 5_000, 10
# Below the smaller set, so that both sets fill a window.
SHUFFLE_WINDOW = 4096
SAMPLES_PER_STEP = 64
NUM_WORDS = 3000
SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True)
class Measurement:
    """Peak resident memory of the process, in MiB; `task_mib` that of the largest Ray task beside it (0: none)."""

    mib: float
    task_mib: float
    rows_per_second: float


def write_rows_as_json(path: Path, num_rows: int) -> None:
    """Questions and answers of random words; the same for the same number."""
    rng = random.Random(num_rows)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(NUM_WORDS)]

    def text(shortest: int, longest: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(shortest, longest)))

    with path.open("w") as file:
        for _ in range(num_rows):
            file.write(json.dumps({"prompt": text(25, 70), "response": text(30, 120)}) + "\n")


def measure_preparation(folder: str) -> tuple[Measurement, PreparedIndex]:
    """Prepares `rows.jsonl` of a folder as one task of the cluster does."""
    settings = DataSettings(train=(f"{folder}/rows.jsonl",), max_length=1024)
    shards = inspect_shards(settings)
    preparation = Preparation(settings, f"{folder}/../tokenizer", None, frozenset(), f"{folder}/data")
    started = time.perf_counter()
    (task,) = cut_shards(shards)
    record = write_rows(task, preparation)
    seconds = time.perf_counter() - started
    parts = tuple(
        PreparedPart(**{**entry, "path": f"{folder}/data/parts/{entry['path']}"}) for entry in record["parts"]
    )
    num_rows = sum(part.num_rows for part in parts)
    index = PreparedIndex(parts, num_rows, 0, {}, "", (shards[0].path,))
    return Measurement(_peak_mib(), 0.0, num_rows / seconds), index


def measure_stream(index: PreparedIndex) -> Measurement:
    """One epoch of the samples of one rank, which does nothing with them."""
    import logging

    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=400 << 20)
    plan = StreamPlan(index, 0, SAMPLES_PER_STEP, SHUFFLE_WINDOW, num_epochs=1, max_steps=None)
    started = time.perf_counter()
    with _LargestTask() as largest:
        num_samples = sum(len(samples) for samples in rank_steps(plan, 0, 1, 0))
    seconds = time.perf_counter() - started
    ray.shutdown()
    assert num_samples == index.num_rows
    return Measurement(_peak_mib(), largest.mib, num_samples / seconds)


class _LargestTask:
    """Looks at the worker processes of this user's Ray that were started since, until the block ends."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name().startswith("ray::"):
                        self.mib = max(self.mib, process.memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    continue

    def __enter__(self) -> "_LargestTask":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    """Measures both sets and prints the table and the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows; below three minutes on two cores")
    num_rows = QUICK_ROWS if parser.parse_args().quick else NUM_ROWS
    measured: dict[str, list[Measurement]] = {"preparation task": [], "training rank": []}
    with tempfile.TemporaryDirectory(prefix="marsray-benchmark-") as root:
        for size in (num_rows, num_rows * FACTOR):
            folder = Path(root) / str(size)
            folder.mkdir()
            write_rows_as_json(folder / "rows.jsonl", size)
            if size == num_rows:
                with (folder / "rows.jsonl").open() as lines:
                    texts = [json.loads(line)["prompt"] for line, _ in zip(lines, range(2000), strict=False)]
                train_tokenizer(iter(texts), vocab_size=4096, max_positions=1024).save_pretrained(f"{root}/tokenizer")
            preparation, index = alone(measure_preparation, str(folder))
            measured["preparation task"].append(preparation)
            measured["training rank"].append(alone(measure_stream, index))
    sys.stdout.write(_report(measured, num_rows))


def _report(measured: dict[str, list[Measurement]], num_rows: int) -> str:
    rows = [
        [name, num_rows * factor, round(each.mib, 1), round(each.task_mib, 1) or None, round(each.rows_per_second)]
        for name, pair in measured.items()
        for factor, each in zip((1, FACTOR), pair, strict=True)
    ]
    (small, large), (few, many) = measured["preparation task"], measured["training rank"]
    last = {
        "rss_ratio_10x_preparation": round(large.mib / small.mib, 3),
        "rss_ratio_10x_stream": round(many.mib / few.mib, 3),
        "rss_ratio_10x_stream_tasks": round(many.task_mib / few.task_mib, 3),
        "preparation_rows_per_second": round(large.rows_per_second),
        "stream_samples_per_second": round(many.rows_per_second),
        "num_rows": num_rows,
    }
    headers = ["process", "rows", "peak MiB", "largest task MiB", "rows/s"]
    return text_table(headers, rows) + f"windows of {SHUFFLE_WINDOW} rows\n" + json.dumps(last) + "\n"


if __name__ == "__main__":
    main()
