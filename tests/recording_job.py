"""Trains like `jobs/train_mars.py`, slowly, and notes what each training worker packs: `python recording_job.py FOLDER ARGUMENT...`

Worker PID writes a line per call to `FOLDER/PID.jsonl`: its rank, and (epoch, file, row) of the samples. The first line is that
of the held-out samples, which are packed once; then there is one for each step. `FOLDER/saving-STEP-PID` is there while the worker
of the second rank has still to write its share of a checkpoint.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from jobs import train_mars
from pipelines import checkpoint_store, training_stage
from workers.objectives.mars import MarsObjective
from workers.training.checkpoint import save_training_state

SECONDS_PER_STEP = 0.5
FOLDER = Path(sys.argv[1])


def save_slowly(engine, folder, *, num_steps_done):
    """The second rank says so and waits before it writes its share, so that it can be killed there."""
    if dist.get_rank() == 1:
        (FOLDER / f"saving-{num_steps_done}-{os.getpid()}").touch()
        time.sleep(2 * SECONDS_PER_STEP)
    save_training_state(engine, folder, num_steps_done=num_steps_done)


class RecordingObjective(MarsObjective):
    def pack(self, samples, **sizes):
        line = [dist.get_rank(), [[sample.epoch, sample.file, sample.row] for sample in samples]]
        with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        checkpoint_store.save_training_state = save_slowly
        time.sleep(SECONDS_PER_STEP)
        return super().pack(samples, **sizes)


if __name__ == "__main__":
    training_stage.MarsObjective = RecordingObjective  # travels to the workers by value, being of the main module
    sys.exit(train_mars.main(sys.argv[2:]))
