#!/usr/bin/env python3
"""Speed of the decoding engine against `transformers`, of its caches and of its windows.

    python benchmarks/decoding.py                                  a tiny model that is trained on the spot, then the shape of
                                                                   SmolLM2-135M with random weights, whose figures are the last line
    python benchmarks/decoding.py --quick                          only the latter, less work, within three minutes on two cores
    python benchmarks/decoding.py --model FOLDER --prompts FILE    a trained model on prompts of its own

One process, one thread (on a CPU), greedy. All methods that are compared take turns on the same rows, `--repeats` times; figures
are medians over the repeats, with the least and the largest in the tables and under `..._spread`. On a CPU seconds are CPU seconds
of the process, of which one thread is busy, with wall-clock seconds beside them; on a GPU they are wall-clock seconds. Prefill is
counted.

By batch size, on as many rows as slots, all with prompts and answers of one length (the best case of a static batch):
  one_token_vs_generate          one-token mode against `generate`
  ragged_cache_vs_block_cache    both in one-token mode
  auto_window_vs_one_token       verified mode with the automatic window against one-token mode
  auto_window_vs_best_fixed      the same against the best fixed window: 1 (one-token mode), 2, 4, 8, with and without branches
  tokens_per_forward             of verified mode with the automatic window
  window_cost                    seconds of a step with 2, 4, 8 query tokens a row by one with 1
Numbers, on ragged work (prompts of 8-256, answers of 8-128 tokens of forced length, 64 requests, 16 slots), one-token mode:
  ragged_prompts_vs_generate     against `generate` on batches of 16 rows, sorted so that they take least
  continuous_vs_generate_batch   our continuous batching against that of `transformers`: the manager behind its `generate_batch`,
                                 with as many slots, and a budget for each request, which `generate_batch` itself has not
  engine_overhead_share          of the engine's steps: what is not forward and head of the model

With random weights drafts would be right by chance only, so those of an untrained model are replaced: each is the true next token
with probability 0.7 (a full run adds 0), drawn from seeds. A trained model drafts itself; its windows are compared on ragged rows,
twice as many as slots, that end at its end tokens. The automatic window has an engine of its own, kept for all repeats and warmed
like every other method: its measurement of costs is part of the untimed runs, what it learns of drafts stays, as in a server.

Every repeat compares tokens: one-token mode and continuous batching with `generate`, the block cache and every verified window with
one-token mode. `rows_with_other_tokens` has rows that differ, rows, and how many of those that differ do so at a near-tie (the
plain model's two likeliest tokens closer than 1e-5). In float32 a row that differs elsewhere makes the exit code 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder

import torch

from benchmarks import decoding_comparison, decoding_costs, decoding_figures
from benchmarks.decoding_comparison import AGREEMENT, Comparison, batch_methods, ragged_methods, window_methods
from benchmarks.decoding_costs import measure_step_costs
from benchmarks.decoding_figures import BatchRuns, Figures
from benchmarks.decoding_methods import Engines
from benchmarks.decoding_models import SMOLLM2_LAYERS, Subject, load_subject, random_smollm2, trained_walker
from benchmarks.decoding_report import table
from benchmarks.decoding_work import (
    EQUAL,
    FULL,
    NATURAL,
    QUICK,
    RAGGED,
    Sizes,
    equal_work,
    natural_work,
    ragged_work,
    read_prompts,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_PROMPTS = 512
ROWS_PER_SLOT = 2
RAGGED_SLOTS = 16
REPEATS = 3


def measure(subject: Subject, options: argparse.Namespace) -> Figures:
    """All figures of one model; writes the tables to standard output."""
    sizes = sizes_of(options)
    tell = _tell(options)
    sys.stdout.write(f"\n{subject.name}, {subject.model.dtype} on {subject.device}, block size {subject.block_size}\n")
    if not subject.is_trained:
        never = "" if options.quick else f" ({decoding_comparison.AUTO_NEVER_RIGHT}: 0)"
        sys.stdout.write(
            f"drafts are replaced: each is the true next token with probability {AGREEMENT}{never}, seeded\n"
        )
    batches = {size: _measure_batch(subject, size, options, tell) for size in options.batches}
    work = ragged_work(subject, sizes.num_ragged, 0, sizes)
    ragged = Comparison(subject, RAGGED_SLOTS, RAGGED, ragged_methods(Engines(subject, RAGGED_SLOTS, work.max_length)))
    ragged.run(work, options.repeats, tell)
    figures = Figures(batches, ragged)
    sys.stdout.write(
        table(decoding_comparison.HEADERS, [row for each in figures.comparisons for row in each.rows()]) + "\n"
    )
    costs = [row for runs in batches.values() for row in runs.costs.rows()]
    sys.stdout.write(table(decoding_costs.HEADERS, costs) + "\n")
    sys.stdout.write(table(decoding_figures.HEADERS, figures.rows()) + "\n")
    sys.stdout.flush()
    return figures


def _measure_batch(
    subject: Subject, batch_size: int, options: argparse.Namespace, tell: Callable[[str], None]
) -> BatchRuns:
    """One batch size: windows on the equal work too, but for a trained model, which ends its answers itself."""
    sizes = sizes_of(options)
    work = equal_work(subject, batch_size, sizes)
    engines = Engines(subject, batch_size, work.max_length)
    methods = batch_methods(engines)
    if not subject.is_trained:
        methods |= window_methods(engines, is_quick=options.quick)
    equal = Comparison(subject, batch_size, EQUAL, methods)
    equal.run(work, options.repeats, tell)
    windows = equal
    if subject.is_trained:
        work = natural_work(subject, ROWS_PER_SLOT * batch_size, 0, sizes)
        engines = Engines(subject, batch_size, work.max_length)
        windows = Comparison(subject, batch_size, NATURAL, window_methods(engines, is_quick=options.quick))
        windows.run(work, options.repeats, tell)
    num_steps = decoding_costs.QUICK_TIMED_STEPS if options.quick else decoding_costs.TIMED_STEPS
    return BatchRuns(equal, windows, measure_step_costs(subject, batch_size, options.repeats, num_steps, tell))


def _tell(options: argparse.Namespace) -> Callable[[str], None]:
    """Says on standard error how far it is."""
    started = time.perf_counter()

    def tell(text: str) -> None:
        if not options.silent:
            sys.stderr.write(f"{text}, {time.perf_counter() - started:.0f} s\n")

    return tell


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to measure; shared with `device_check.py`."""
    parser.add_argument(
        "--quick", action="store_true", help="no trained model, fewer and shorter rows, batches 1 and 4"
    )
    parser.add_argument("--model", help="a trained model folder instead of the models made here")
    parser.add_argument("--prompts", help="JSONL file, or Parquet file or folder, of prompts for --model")
    parser.add_argument("--prompt-column", default="messages", help="text, or a list of messages (default: messages)")
    parser.add_argument("--batches", type=int, nargs="+", help="rows decoded at once (default: 1 4 16)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"turns of all methods (default: {REPEATS})")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="budget where end tokens end answers")
    parser.add_argument("--silent", action="store_true", help="no progress on standard error")


def fill_in(options: argparse.Namespace) -> None:
    """Defaults that depend on `--quick`."""
    options.batches = options.batches or ([1, 4] if options.quick else [1, 4, 16])


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Lengths of the works."""
    return replace(QUICK if options.quick else FULL, max_new_tokens=options.max_new_tokens)


def subjects(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Subject]:
    """The models to measure."""
    if options.model:
        prompts = []
        if options.prompts:
            prompts = read_prompts(options.prompts, options.prompt_column, options.model, NUM_PROMPTS)
        else:
            sys.stdout.write("no --prompts: prompts are random tokens, on which the ratios of windows say little\n")
        return [load_subject(options.model, prompts, device, dtype)]
    smollm2 = random_smollm2(SMOLLM2_LAYERS, device, dtype)
    return [smollm2] if options.quick else [trained_walker(150, device, dtype, width=128, num_layers=3), smollm2]


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes tables and a JSON line for each model to standard output; 1 when a float32 row is wrong."""
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
            f"quick: all layers; cut are lengths (equal work {QUICK.prompt} + {QUICK.output} tokens, ragged prompts "
            f"{QUICK.ragged_prompts}, answers {QUICK.ragged_outputs}), branches beyond\na window of 2, batch 16 and the trained "
            f"model; {QUICK.num_ragged} ragged requests in {RAGGED_SLOTS} slots are one batch: none joins while others run\n"
        )
    num_wrong = 0
    for subject in subjects(options, device, DTYPES[options.dtype]):
        cpu, wall = time.process_time(), time.perf_counter()
        figures = measure(subject, options)
        num_wrong += figures.num_wrong
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        sys.stdout.write(f"took {wall:.0f} s, {cpu:.0f} s of CPU time\n")
        facts = {"model": subject.name, "device": options.device, "dtype": options.dtype, "ragged_slots": RAGGED_SLOTS}
        if not subject.is_trained:
            facts["draft_agreement"] = AGREEMENT
        sys.stdout.write(json.dumps(figures.values() | facts) + "\n")
    return 1 if num_wrong and options.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
