#!/usr/bin/env python3
"""Accuracy, tokens per forward and tokens per second at a grid of settings. `jobs/evaluate.py --help` lists every setting."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs.command_line import EXIT_DONE, run
from workers.config import EvaluateRecipe


def execute(recipe: EvaluateRecipe, is_dry_run: bool) -> int:
    """Evaluates, or only checks when this is a dry run."""
    from pipelines.evaluation import run_evaluation

    report = run_evaluation(recipe, dry_run=is_dry_run)
    if report is None:
        return EXIT_DONE
    sys.stdout.write(report.table())
    return report.exit_code


def main(arguments: list[str] | None = None) -> int:
    """Runs the job with these arguments, or those of the command line; returns the exit code."""
    return run(EvaluateRecipe, "evaluate.yaml", execute, arguments)


if __name__ == "__main__":
    sys.exit(main())
