#!/usr/bin/env python3
"""AR SFT: ordinary next-token training on the assistant turns. `jobs/train_sft.py --help` lists every setting."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs.command_line import EXIT_DONE, run
from workers.config import TrainMarsRecipe, TrainSftRecipe


def execute(recipe: TrainSftRecipe | TrainMarsRecipe, is_dry_run: bool) -> int:
    """Trains, or only checks when this is a dry run."""
    from pipelines.reports import training_table
    from pipelines.training import run_training

    report = run_training(recipe, dry_run=is_dry_run)
    if report is not None:
        sys.stdout.write(training_table(report))
    return EXIT_DONE


def main(arguments: list[str] | None = None) -> int:
    """Runs the job with these arguments, or those of the command line; returns the exit code."""
    return run(TrainSftRecipe, "train_sft.yaml", execute, arguments)


if __name__ == "__main__":
    sys.exit(main())
