#!/usr/bin/env python3
"""Speed of the decoding engine against `transformers`, of its caches and of its windows.

    python benchmarks/decoding.py                                       SmolLM2-135M's shape with random weights, and a tiny
                                                                        model that is trained on the spot
    python benchmarks/decoding.py --quick                               less of both, within three minutes on two cores
    python benchmarks/decoding.py --model FOLDER --prompts FILE         a trained model on prompts of its own

One process, one thread (on a CPU), greedy. The methods take turns on the same rows; each repeat has rows of its own. Equal work
has prompts of one length and one budget, the best case of a static batch; ragged work has the lengths of GSM8K
(`benchmarks/lengths.py`) and several times as many rows as fit beside each other, of which a static batch takes as many as fit,
in order. Tokens per second count prefill and kept tokens only. On a CPU seconds are CPU seconds of the process, with wall-clock
seconds beside them; on a GPU they are wall-clock seconds.

Every repeat compares tokens: one-token decoding and continuous batching with `generate`, the block cache and every verified window
with one-token decoding. Rows that differ are counted, with the gap between the two likeliest tokens where they part; in the JSON
object: rows that differ, rows, and how many of those that differ do so at a near-tie (below 1e-5).

With random weights drafts are accepted by chance only: such a model is asked for one-token ratios and for the cost of a step by
window. The last line of the output is one JSON object; its figures are median, least and largest over the repeats, and ratios above
1 mean that the method named first is faster.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder

import torch

from benchmarks import decoding_comparison, decoding_costs
from benchmarks.decoding_comparison import Comparison, figures, make_methods, method_names, spread
from benchmarks.decoding_costs import measure_step_costs
from benchmarks.decoding_models import SMOLLM2_LAYERS, Subject, load_subject, random_smollm2, trained_walker
from benchmarks.decoding_report import facts, table
from benchmarks.decoding_work import EQUAL, RAGGED, Lengths, equal_work, ragged_work, read_prompts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_PROMPTS = 512
FEWEST_ROWS = 4
QUICK_SCALE, QUICK_TINY_SCALE = 0.15, 0.5


def measure(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """All batch sizes of one model: writes the tables to standard output, returns the figures by batch size."""
    lengths = Lengths(options.length_scale or _default_scale(subject, options), options.max_new_tokens)
    sys.stdout.write(f"\n{subject.name}, {subject.model.dtype} on {subject.device}, block size {subject.block_size}\n")
    comparisons, costs, values = [], [], {}
    for batch_size in options.batches:
        num_rows = max(FEWEST_ROWS, batch_size * options.rows_per_slot)
        pair = []
        for kind, make in ((EQUAL, equal_work), (RAGGED, ragged_work)):
            works = [make(subject, num_rows, repeat, lengths) for repeat in range(options.repeats)]
            methods = make_methods(subject, batch_size, max(work.max_length for work in works), kind)
            chosen = {name: method for name, method in methods.items() if _is_chosen(name, options.methods)}
            comparison = Comparison(subject, batch_size, kind, chosen)
            comparison.run(works, _tell(options))
            pair.append(comparison)
        comparisons += pair
        values[f"batch_{batch_size}"] = figures(*pair)
        if not options.methods:
            costs.append(measure_step_costs(subject, batch_size, options.repeats, _tell(options)))
            ratios = costs[-1].ratios()
            values[f"batch_{batch_size}"]["step_cost"] = {name: spread(each) for name, each in ratios.items()}
    sys.stdout.write(table(decoding_comparison.HEADERS, [row for each in comparisons for row in each.rows()]) + "\n")
    if costs:
        sys.stdout.write(table(decoding_costs.HEADERS, [row for each in costs for row in each.rows()]) + "\n")
    sys.stdout.write("median, least, largest over the repeats\n" + facts(values) + "\n")
    sys.stdout.flush()
    return values


def _default_scale(subject: Subject, options: argparse.Namespace) -> float:
    """Tiny models need no shorter answers to be quick: their runs would be too short to time."""
    if not options.quick:
        return 1.0
    return QUICK_TINY_SCALE if subject.is_walk else QUICK_SCALE


def _is_chosen(name: str, methods: list[str] | None) -> bool:
    return not methods or name in methods


def _tell(options: argparse.Namespace) -> Callable[[str], None]:
    """Says on standard error how far it is."""
    started = time.perf_counter()

    def tell(text: str) -> None:
        if not options.silent:
            sys.stderr.write(f"{text}, {time.perf_counter() - started:.0f} s\n")

    return tell


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to measure; shared with `device_check.py`."""
    parser.add_argument("--quick", action="store_true", help="smaller models, shorter answers, batches 1 and 4")
    parser.add_argument("--model", help="a trained model folder instead of the models made here")
    parser.add_argument("--prompts", help="JSONL file, or Parquet file or folder, of prompts for --model")
    parser.add_argument("--prompt-column", default="messages", help="text, or a list of messages (default: messages)")
    parser.add_argument("--batches", type=int, nargs="+", help="rows decoded at once (default: 1 4 16)")
    parser.add_argument("--rows-per-slot", type=int, default=2, help="rows of a work for each row decoded at once")
    parser.add_argument("--repeats", type=int, help="works of each kind (default: 3; 2 with --quick)")
    parser.add_argument("--length-scale", type=float, help="of the lengths of GSM8K (default: 1; less with --quick)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="budget where end tokens end answers")
    parser.add_argument("--methods", nargs="+", choices=method_names(), help="only these, and no cost by window")
    parser.add_argument("--silent", action="store_true", help="no progress on standard error")


def fill_in(options: argparse.Namespace) -> None:
    """Defaults that depend on `--quick`."""
    options.batches = options.batches or ([1, 4] if options.quick else [1, 4, 16])
    options.repeats = options.repeats or (2 if options.quick else 3)


def subjects(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Subject]:
    """The models to measure."""
    if options.model:
        prompts = []
        if options.prompts:
            prompts = read_prompts(options.prompts, options.prompt_column, options.model, NUM_PROMPTS)
        else:
            sys.stdout.write("no --prompts: prompts are random tokens, on which the ratios of windows say little\n")
        return [load_subject(options.model, prompts, device, dtype)]
    if options.quick:
        return [random_smollm2(2, device, dtype), trained_walker(150, device, dtype)]
    return [random_smollm2(SMOLLM2_LAYERS, device, dtype), trained_walker(150, device, dtype, width=128, num_layers=3)]


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes the tables and the JSON line to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args(arguments)
    fill_in(options)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if options.quick:
        sys.stdout.write(
            "quick: few layers, short answers, few repeats; the figures to quote are those of the full run\n"
        )
    values = {subject.name: measure(subject, options) for subject in subjects(options, device, DTYPES[options.dtype])}
    sys.stdout.write(json.dumps({"device": options.device, "dtype": options.dtype, **values}) + "\n")


if __name__ == "__main__":
    main()
