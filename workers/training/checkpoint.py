"""Training state on disk: every rank writes its share; a restart reads it back, with another number of ranks if need be."""

import contextlib
import io
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TAG = "state"


def save_training_state(engine: Any, folder: Path, *, num_steps_done: int) -> None:
    """Writes model, optimizer, schedule, position and this rank's random state into `folder`. All ranks must call it.

    Weights that are not trained are left out: the start model has them.
    """
    from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO

    # The converter wants to find this attribute; it would describe tensors that are split over ranks by column or row.
    setattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, {})
    engine.save_checkpoint(
        str(folder),
        tag=_TAG,
        client_state={"num_steps_done": num_steps_done},
        save_latest=False,
        exclude_frozen_parameters=True,
    )
    # DeepSpeed keeps one client state for all ranks, so the random states have files of their own.
    state = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    torch.save(state, _random_state_path(folder, dist.get_rank()))


def load_training_state(engine: Any, folder: Path, scratch: Path) -> int:
    """Restores what `save_training_state` wrote, from the shares of all ranks in `folder`. All ranks must call it.

    Another number of ranks may go on than has saved: then the optimizer state is cut anew, and each rank keeps
    the random state it has, which its caller has seeded by rank. Any start model will do that has the same frozen weights.

    Args:
        scratch: folder of this node, another one for each rank, for what is cut anew; it is deleted before and after.

    Returns:
        The number of optimizer steps that were done.
    """
    num_saved = len(list(folder.glob("random-state-*.pt")))
    if num_saved == dist.get_world_size():
        num_steps_done = _load(engine, folder)
        state = torch.load(_random_state_path(folder, dist.get_rank()), weights_only=True)
        torch.set_rng_state(state["cpu"])
        torch.cuda.set_rng_state_all(state["cuda"])
        return num_steps_done
    if engine.zero_optimization_stage() == 0:  # without ZeRO the first rank has saved all of it
        return _load(engine, folder)
    with _converted(folder, scratch) as universal:
        engine._config.load_universal_checkpoint = True
        num_steps_done = _load(engine, universal)
        engine._config.load_universal_checkpoint = False
        return num_steps_done


def _load(engine: Any, folder: Path) -> int:
    has_frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
    loaded, client_state = engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=not has_frozen)
    assert loaded is not None, f"no training state in {folder}"
    return int(client_state["num_steps_done"])


@contextlib.contextmanager
def _converted(folder: Path, scratch: Path) -> Iterator[Path]:
    """DeepSpeed's universal checkpoint of a state: one file for each parameter and moment, from which each rank cuts its share.

    The first rank of each node converts, into its `scratch`, which needs about three times the size of the state while it works.
    """
    copy = None
    if int(os.environ["LOCAL_RANK"]) == 0:
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed conversion has left
        copy = str(scratch)
        _convert(folder / _TAG, scratch / _TAG)
    copies: list[tuple[str, str | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(copies, (os.uname().nodename, copy))
    try:
        yield Path(next(path for node, path in copies if node == os.uname().nodename and path is not None))
        dist.barrier()  # every rank of the node has read its share
    finally:
        if copy is not None:
            shutil.rmtree(copy)


def _convert(source: Path, destination: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(destination),
        num_extract_workers=1,  # more of them would fork a process that has threads, and a GPU
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # it prints its progress
        ds_to_universal.main(arguments)


def _random_state_path(folder: Path, rank: int) -> Path:
    return folder / f"random-state-{rank:05d}.pt"
