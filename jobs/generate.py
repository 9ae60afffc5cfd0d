#!/usr/bin/env python3
"""Batch inference over a prompt set. `jobs/generate.py --help` lists every setting."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs.command_line import EXIT_DONE, run
from workers.config import GenerateRecipe


def execute(recipe: GenerateRecipe, is_dry_run: bool) -> int:
    """Generates, or only checks when this is a dry run."""
    from pipelines.generation import run_generation

    report = run_generation(recipe, dry_run=is_dry_run)
    if report is None:
        return EXIT_DONE
    sys.stdout.write(report.table())
    if report.exit_code != EXIT_DONE:
        sys.stderr.write(
            f"{report.num_errors} of {report.num_rows} rows failed, more than max_error_share={recipe.max_error_share:g} "
            f"allows; {report.output}/_errors says which and why\n"
        )
    return report.exit_code


def main(arguments: list[str] | None = None) -> int:
    """Runs the job with these arguments, or those of the command line; returns the exit code."""
    return run(GenerateRecipe, "generate.yaml", execute, arguments)


if __name__ == "__main__":
    sys.exit(main())
