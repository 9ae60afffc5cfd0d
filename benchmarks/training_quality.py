#!/usr/bin/env python3
"""Quality of training: does MARS keep one-token quality, what do `ar_weight` and the random block phase do?

    python benchmarks/training_quality.py quickstart --seeds 0 1 --steps 600
    python benchmarks/training_quality.py finetune --model MODEL --train TRAIN.jsonl --held-out HELD_OUT.jsonl --steps 30
    python benchmarks/training_quality.py --quick

`quickstart` trains one AR model per seed on the embedded task and continues from it in several ways, with the same samples and
steps. `finetune` does the same with AR SFT, MARS, and MARS without the AR loss, for a model folder and JSONL rows of one's own.
`--quick` is a miniature of `quickstart`: it shows that everything runs, and its models have learned nothing. Finished runs in
`--output` are taken as they are, so a stopped benchmark goes on with the same command. The last line of the output is one JSON
object.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder

import torch

from benchmarks.held_out import encode, held_out_losses, jsonl_pairs, quickstart_floor, quickstart_pairs
from benchmarks.quality_runs import (
    AR,
    MARS,
    START,
    THRESHOLD,
    VARIANTS,
    WINDOWS,
    Outcome,
    Variant,
    decode,
    outcome_of,
    train_variant,
)
from jobs.command_line import start_logging
from pipelines.paths import resolve
from pipelines.reports import text_table

FINETUNE_VARIANTS = (AR, MARS, Variant(8, ar_weight=0.0))
QUICK_VARIANTS = (AR, MARS)


def main(arguments: list[str] | None = None) -> None:
    """Runs what the command line asks for and writes tables and JSON to standard output."""
    options = _options(arguments)
    start_logging()
    torch.set_num_threads(1)
    if options.task == "finetune":
        outcomes = finetune(options)
    else:
        outcomes = [outcome for seed in options.seeds for outcome in quickstart(options, seed)]
    sys.stdout.write(table(outcomes))
    sys.stdout.write(json.dumps(summary(outcomes)) + "\n")


def quickstart(options: argparse.Namespace, seed: int) -> list[Outcome]:
    """All variants of one seed; the seed chooses data, first weights, order and cuts."""
    folder = f"{options.output}/quickstart/seed{seed}"
    common = [f"distributed.num_workers={options.workers}", f"run.seed={seed}", "run.log_every=50"]
    base, base_seconds = train_variant(START, f"{folder}/base", [*common, *_steps(options.base_steps)])
    example = Path(resolve(f"{folder}/base/example"))
    pairs = quickstart_pairs(example / "heldout", seed)
    samples = encode(base, pairs, max_length=256)
    floor = quickstart_floor(pairs, samples)

    def judge(variant: Variant, model: str, seconds: float, output: str) -> Outcome:
        report = decode(variant, model, str(example / "heldout"), output)
        return outcome_of(variant, seed, held_out_losses(model, samples), floor, seconds, report)

    outcomes = [judge(START, base, base_seconds, f"{folder}/base_decoded")]
    shared = [
        f"model.path={base}",
        f"data.train={example / 'train'}",
        "training.learning_rate=1.5e-3",
        *common,
        *_steps(options.steps),
    ]
    for variant in QUICK_VARIANTS if options.quick else [each for each in VARIANTS if each.name in options.variants]:
        name = f"{folder}/{variant.name}_{options.steps}"
        model, seconds = train_variant(variant, name, shared)
        outcomes.append(judge(variant, model, seconds, f"{name}_decoded"))
    return outcomes


def finetune(options: argparse.Namespace) -> list[Outcome]:
    """AR SFT and MARS from the same model folder with equal data, judged by held-out losses alone."""
    pairs = jsonl_pairs(Path(options.held_out), options.prompt_column, options.response_column)
    samples = encode(options.model, pairs, options.max_length)
    outcomes = [Outcome(START, 0, held_out_losses(options.model, samples), None, 0.0, None, {})]
    for seed in options.seeds:
        shared = [
            f"model.path={options.model}",
            f"model.mask_token={options.mask_token}",
            f"data.train={options.train}",
            f"data.prompt_column={options.prompt_column}",
            f"data.response_column={options.response_column}",
            f"data.max_length={options.max_length}",
            f"training.samples_per_step={options.samples_per_step}",
            f"training.learning_rate={options.learning_rate}",
            "training.row_tokens=512",
            "training.micro_batch_rows=1",
            f"distributed.num_workers={options.workers}",
            "distributed.zero_stage=0",  # a single worker has nothing to share; stage 0 keeps no second copy of the weights
            f"run.seed={seed}",
            "run.log_every=2",
            *_steps(options.steps),
        ]
        for variant in FINETUNE_VARIANTS:
            name = f"{options.output}/finetune/seed{seed}/{variant.name}_{options.steps}"
            model, seconds = train_variant(variant, name, shared)
            outcomes.append(Outcome(variant, seed, held_out_losses(model, samples), None, seconds, None, {}))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per variant and seed."""
    headers = ["variant", "seed", "one-token accuracy", "one-token loss", "floor", "mask loss"]
    for window in WINDOWS:
        headers += [f"accuracy W={window}", f"tokens/forward W={window}"]
    rows = []
    for each in sorted(outcomes, key=lambda outcome: outcome.variant.name):
        row = [each.variant.name, each.seed, each.accuracy, each.losses.one_token, each.floor, each.losses.mask]
        for window in WINDOWS:
            row += each.tau.get(window, (None, None))
        rows.append([*row, round(each.seconds)])
    return f"\ntau {THRESHOLD}; losses in nats per held-out response token\n" + text_table([*headers, "seconds"], rows)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Means over seeds by variant, and each outcome."""
    variants = {outcome.variant.name: outcome.variant for outcome in outcomes}
    means: dict[str, Any] = {}
    for name in variants:
        members = [outcome for outcome in outcomes if outcome.variant.name == name]
        means[name] = {
            "one_token_accuracy": _mean([each.accuracy for each in members]),
            "one_token_loss": _mean([each.losses.one_token for each in members]),
            "mask_loss": _mean([each.losses.mask for each in members]),
            "seeds": len(members),
        }
    return {"means": means, "outcomes": [asdict(outcome) for outcome in outcomes]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _steps(num_steps: int) -> list[str]:
    return [f"training.num_steps={num_steps}", f"run.checkpoint_every={num_steps}"]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=("quickstart", "finetune"), default="quickstart")
    parser.add_argument("--quick", action="store_true", help="a miniature of quickstart, within three minutes")
    parser.add_argument("--output", default="runs/training_quality", help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one base model and all variants for each")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", default=names, choices=names, help="what is trained (quickstart)")
    parser.add_argument("--workers", type=int, default=1, help="training workers of each run")
    parser.add_argument("--base-steps", type=int, default=600, help="steps of the common AR SFT (quickstart)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each variant")
    parser.add_argument("--model", help="model folder (finetune)")
    parser.add_argument("--train", help="JSONL shard to train on (finetune)")
    parser.add_argument("--held-out", help="JSONL rows to judge by (finetune)")
    parser.add_argument("--prompt-column", default="prompt", help="column of both files (finetune)")
    parser.add_argument("--response-column", default="response", help="column of both files (finetune)")
    parser.add_argument("--mask-token", default="auto", help="the placeholder (finetune)")
    parser.add_argument("--samples-per-step", type=int, default=8, help="(finetune)")
    parser.add_argument("--max-length", type=int, default=256, help="longest sample in tokens (finetune)")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="peak learning rate (finetune)")
    options = parser.parse_args(arguments)
    if options.task == "finetune" and None in (options.model, options.train, options.held_out):
        parser.error("finetune needs --model, --train and --held-out")
    if options.quick:
        options.output, options.base_steps, options.steps = f"{options.output}_quick", 30, 20
    return options


if __name__ == "__main__":
    main()
