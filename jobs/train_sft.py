#!/usr/bin/env python3
"""AR SFT: ordinary next-token training on the assistant turns. `jobs/train_sft.py --help` lists every setting."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs.command_line import EXIT_DONE, parse, run
from workers.config import TrainMarsRecipe, TrainSftRecipe

_logger = logging.getLogger("marsray")


def execute(recipe: TrainSftRecipe | TrainMarsRecipe, is_dry_run: bool) -> int:
    """Trains, or only checks when this is a dry run."""
    from pipelines.reports import training_table
    from pipelines.training import run_training

    _warn_of_the_pace(recipe)
    report = run_training(recipe, dry_run=is_dry_run)
    if report is not None:
        sys.stdout.write(training_table(report))
    return EXIT_DONE


def _warn_of_the_pace(recipe: TrainSftRecipe | TrainMarsRecipe) -> None:
    """Says that a model of the user's would be trained at the pace of the default recipe, which is for the tiny example."""
    default_recipe = "train_mars.yaml" if isinstance(recipe, TrainMarsRecipe) else "train_sft.yaml"
    default, _ = parse(type(recipe), default_recipe, [])
    pace, default_pace = (
        {name: getattr(each.training, name) for name in ("learning_rate", "num_steps", "num_epochs")}
        for each in (recipe, default)
    )
    if recipe.model.path is not None and pace == default_pace:
        _logger.warning(
            "training.learning_rate=%(learning_rate)g and training.num_steps=%(num_steps)d are the default recipe's, "
            "for its tiny model; give yours a pace of its own",
            pace,
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the job with these arguments, or those of the command line; returns the exit code."""
    return run(TrainSftRecipe, "train_sft.yaml", execute, arguments)


if __name__ == "__main__":
    sys.exit(main())
