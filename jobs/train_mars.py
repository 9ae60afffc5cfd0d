#!/usr/bin/env python3
"""MARS: an AR model learns to predict several tokens per forward. `jobs/train_mars.py --help` lists every setting."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs.command_line import run
from jobs.train_sft import execute
from workers.config import TrainMarsRecipe


def main(arguments: list[str] | None = None) -> int:
    """Runs the job with these arguments, or those of the command line; returns the exit code."""
    return run(TrainMarsRecipe, "train_mars.yaml", execute, arguments)


if __name__ == "__main__":
    sys.exit(main())
