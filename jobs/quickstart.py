#!/usr/bin/env python3
"""The whole way on an embedded example: shards, AR SFT, MARS, generation one token per forward and several, a table.

It runs the same jobs as the command line, in one process so that they share one Ray instance, and starts afresh each time.
"""

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

from jobs import generate, train_mars
from jobs.command_line import EXIT_DONE

FOLDER = "runs/quickstart"
THRESHOLD = 0.95
_logger = logging.getLogger("marsray")


def main() -> int:
    """Returns the exit code of the first job that does not end well, or 0."""
    from pipelines.quickstart_report import DecodedSet, write_quickstart_report

    train = [f"run.output={FOLDER}/train", "run.overwrite=true"]
    started = time.time()
    code = _run("train_mars", train_mars.main, train)
    if code != EXIT_DONE:
        return code
    train_seconds = time.time() - started

    started = time.time()
    decoded = []
    for stage in ("sft", "mars"):
        for mode in ("one_token", "tau"):
            output = f"{FOLDER}/{stage}_{mode}"
            arguments = [
                f"model={FOLDER}/train/{stage}/model",
                f"prompts.paths={FOLDER}/train/example/heldout",
                "prompts.passthrough=messages",
                f"decoding.mode={mode}",
                f"output={output}",
                "overwrite=true",
            ]
            if mode == "tau":
                arguments += [f"decoding.threshold={THRESHOLD}", "decoding.window=8"]
            code = _run("generate", generate.main, arguments)
            if code != EXIT_DONE:
                return code
            decoded.append(DecodedSet(stage, mode, output))
    table = write_quickstart_report(
        FOLDER,
        decoded,
        threshold=THRESHOLD,
        train_seconds=train_seconds,
        generate_seconds=time.time() - started,
    )
    sys.stdout.write(table)
    return EXIT_DONE


def _run(name: str, job_main, arguments: list[str]) -> int:  # type: ignore[no-untyped-def]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    _logger.info("$ python jobs/%s.py %s", name, " ".join(arguments))
    return int(job_main(arguments))


if __name__ == "__main__":
    sys.exit(main())
