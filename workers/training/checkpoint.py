"""Training state on disk: every rank writes its share; a restart reads it back."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TAG = "state"


def save_training_state(engine: Any, folder: Path, *, num_steps_done: int) -> None:
    """Writes model, optimizer, schedule, position and this rank's random state into `folder`. All ranks must call it."""
    engine.save_checkpoint(str(folder), tag=_TAG, client_state={"num_steps_done": num_steps_done}, save_latest=False)
    # DeepSpeed keeps one client state for all ranks, so the random states have files of their own.
    state = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    torch.save(state, _random_state_path(folder))


def load_training_state(engine: Any, folder: Path) -> int:
    """Restores what `save_training_state` wrote, from the shares of all ranks in `folder`.

    Returns:
        The number of optimizer steps that were done.
    """
    loaded, client_state = engine.load_checkpoint(str(folder), tag=_TAG)
    assert loaded is not None, f"no training state in {folder}"
    state = torch.load(_random_state_path(folder), weights_only=True)
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state_all(state["cuda"])
    return int(client_state["num_steps_done"])


def _random_state_path(folder: Path) -> Path:
    return folder / f"random-state-{dist.get_rank():05d}.pt"
