"""Training state on disk: every rank writes its share; a restart reads it back."""

from pathlib import Path
from typing import Any

import torch

_TAG = "state"


def save_training_state(engine: Any, folder: Path, *, num_steps_done: int) -> None:
    """Writes model, optimizer, schedule, random state and position of this rank into `folder`. All ranks must call it."""
    client_state = {"num_steps_done": num_steps_done, "torch_rng": torch.get_rng_state()}
    engine.save_checkpoint(str(folder), tag=_TAG, client_state=client_state, save_latest=False)


def load_training_state(engine: Any, folder: Path) -> int:
    """Restores what `save_training_state` wrote, from the shares of all ranks in `folder`.

    Returns:
        The number of optimizer steps that were done.
    """
    loaded, client_state = engine.load_checkpoint(str(folder), tag=_TAG)
    assert loaded is not None, f"no training state in {folder}"
    torch.set_rng_state(client_state["torch_rng"].cpu())
    return int(client_state["num_steps_done"])
