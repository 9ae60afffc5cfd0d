#!/usr/bin/env python3
"""The whole way on an embedded example: shards, AR SFT, MARS, decoding one token per forward and several, a table.

It runs the same jobs as the command line, in one process so that they share one Ray instance, and starts afresh each time.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs import evaluate, train_mars
from jobs.command_line import EXIT_BAD_INPUT, EXIT_DONE, start_logging

FOLDER = "runs/quickstart"
THRESHOLD = 0.95
SWEEP = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
WINDOW = 8  # also for the AR model, whose own block size is 1
_logger = logging.getLogger("marsray")


def main() -> int:
    """Returns the exit code of the first job that does not end well, or 0."""
    start_logging()
    if len(sys.argv) > 1:
        sys.stdout.write(
            f"{__doc__}\nIt takes no arguments; jobs/train_mars.py and jobs/evaluate.py have the settings.\n"
        )
        return EXIT_DONE if sys.argv[1:] in (["-h"], ["--help"]) else EXIT_BAD_INPUT
    from pipelines.quickstart_report import write_quickstart_report

    started = time.time()
    code = _run("train_mars", train_mars.main, [f"run.output={FOLDER}/train", "run.overwrite=true"])
    train_seconds = time.time() - started

    started = time.time()
    # The AR model drafts as badly as one that has never seen a placeholder must; so it is shown at one threshold only.
    grids = {"sft": ((THRESHOLD,), []), "mars": ((THRESHOLD, *SWEEP), [WINDOW, "auto"])}
    for stage, (thresholds, verified_windows) in grids.items():
        arguments = [
            f"model={FOLDER}/train/{stage}/model",
            f"prompts.paths={FOLDER}/train/example/heldout",
            f"output={FOLDER}/{stage}",
            f"thresholds={json.dumps(thresholds)}",
            f"windows=[{WINDOW}]",
            f"verified_windows={json.dumps(verified_windows)}",
            "overwrite=true",
        ]
        code = code or _run("evaluate", evaluate.main, arguments)
    if code == EXIT_DONE:
        table = write_quickstart_report(
            FOLDER,
            threshold=THRESHOLD,
            window=WINDOW,
            train_seconds=train_seconds,
            generate_seconds=time.time() - started,
        )
        sys.stdout.write("\n" + table)
    return code


def _run(name: str, job_main: Callable[[list[str]], int], arguments: list[str]) -> int:
    _logger.info("$ python jobs/%s.py %s", name, " ".join(arguments))
    return job_main(arguments)


if __name__ == "__main__":
    sys.exit(main())
