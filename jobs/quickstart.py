#!/usr/bin/env python3
"""The whole way on an embedded example: shards, AR SFT, MARS, generation one token per forward and several, a table.

It runs the same jobs as the command line, in one process so that they share one Ray instance, and starts afresh each time.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs import generate, train_mars
from jobs.command_line import EXIT_BAD_INPUT, EXIT_DONE, start_logging

FOLDER = "runs/quickstart"
THRESHOLD = 0.95
WINDOW = 8  # also for the AR model, whose own block size is 1
_logger = logging.getLogger("marsray")


def main() -> int:
    """Returns the exit code of the first job that does not end well, or 0."""
    start_logging()
    if len(sys.argv) > 1:
        sys.stdout.write(
            f"{__doc__}\nIt takes no arguments; jobs/train_mars.py and jobs/generate.py have the settings.\n"
        )
        return EXIT_DONE if sys.argv[1:] in (["-h"], ["--help"]) else EXIT_BAD_INPUT
    from pipelines.quickstart_report import DecodedSet, write_quickstart_report

    started = time.time()
    code = _run("train_mars", train_mars.main, [f"run.output={FOLDER}/train", "run.overwrite=true"])
    train_seconds = time.time() - started

    started = time.time()
    decoded = []
    several = ["decoding.mode=tau", f"decoding.threshold={THRESHOLD}", f"decoding.window={WINDOW}"]
    for stage in ("sft", "mars"):
        for mode, decoding in (("one_token", ["decoding.mode=one_token"]), ("tau", several)):
            decoded.append(DecodedSet(stage, mode, f"{FOLDER}/{stage}_{mode}"))
            arguments = [
                f"model={FOLDER}/train/{stage}/model",
                f"prompts.paths={FOLDER}/train/example/heldout",
                "prompts.passthrough=messages",
                f"output={decoded[-1].output}",
                "overwrite=true",
            ]
            code = code or _run("generate", generate.main, arguments + decoding)
    if code == EXIT_DONE:
        table = write_quickstart_report(
            FOLDER,
            decoded,
            threshold=THRESHOLD,
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
