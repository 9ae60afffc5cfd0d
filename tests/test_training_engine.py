"""The update of an optimizer step is a function of its samples: not of ranks, micro-batches or ZeRO stage."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from tiny_models import MASK_ID, tiny_model

from workers.config import DistributedSettings, OptimizationSettings
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample
from workers.training.checkpoint import load_training_state, save_training_state
from workers.training.engine import build_engine, full_state_dict
from workers.training.loop import train

NUM_STEPS = 4


def samples_of_step(step: int) -> list[Sample]:
    """Five samples, very unequal; two in the last step, so that the third rank is left without any."""
    generator = np.random.default_rng(step)
    samples = []
    for row in range(5 if step < NUM_STEPS - 1 else 2):
        length = int(generator.integers(6, 40))
        ids = generator.integers(2, MASK_ID, length).astype(np.int32)
        samples.append(Sample(0, 10 * step + row, 0, ids, ((length // 3, length),)))
    return samples


def run_rank(rank: int, world_size: int, port: int, folder: str, cases: list[dict]) -> None:
    """One process of a little cluster; trains once for each case and saves the weights that come out."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    for case in cases:
        state = train_case(rank, world_size, Path(folder) / f"{case['name']}-checkpoint", **case)
        if state is not None:
            torch.save(state, f"{folder}/{case['name']}.pt")
    torch.distributed.destroy_process_group()


def train_case(rank, world_size, folder, *, name, stage, model_type="llama", rows=8, row_tokens=64, stop_at=None):
    """Trains `NUM_STEPS` steps; with `stop_at`, saves there and goes on from the file in a new engine."""
    first, restored = 0, None
    for last in [stop_at, NUM_STEPS] if stop_at else [NUM_STEPS]:
        model = tiny_model(model_type).train()
        objective = MarsObjective(4, 1.0, 1.0, True, MASK_ID, seed=0)
        optimization = OptimizationSettings(
            learning_rate=1e-2, warmup_share=0.5, row_tokens=row_tokens, micro_batch_rows=rows, max_grad_norm=0.5
        )
        distributed = DistributedSettings(num_workers=world_size, zero_stage=stage)
        engine = build_engine(LossModule(model, objective, head_chunk=16), optimization, distributed, NUM_STEPS)
        if restored:
            first = load_training_state(engine, restored)
            assert first == stop_at
        train(
            engine,
            objective,
            iter([samples_of_step(step)[rank::world_size] for step in range(first, last)]),
            optimization,
            first_step=first,
            num_steps=last,
            log_every=2,
            checkpoint_every=100,
            on_metrics=lambda metrics: None,
            on_checkpoint=lambda done, metrics: None,
        )
        if last == stop_at:
            restored = folder
            save_training_state(engine, folder, num_steps_done=last)
            torch.distributed.barrier()
    if stage == 3:
        partitioned = [parameter for parameter in model.parameters() if parameter.numel() == 0]
        assert partitioned, "ZeRO-3 has kept every parameter whole"
    return full_state_dict(engine, model, stage)


def spawn(world_size: int, folder: Path, cases: list[dict]) -> dict[str, dict[str, torch.Tensor]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    multiprocessing.spawn(run_rank, (world_size, port, str(folder), cases), nprocs=world_size)
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """One rank, one micro-batch a step, no ZeRO; by model type."""
    cases = [{"name": name, "model_type": name, "stage": 0, "row_tokens": 512} for name in ("llama", "llama_tied")]
    return spawn(1, tmp_path_factory.mktemp("reference"), cases)


def assert_same(state: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], model_type: str) -> None:
    start = tiny_model(model_type).state_dict()
    assert state.keys() == reference.keys() == start.keys()
    moved = max((reference[name] - start[name]).abs().max().item() for name in reference)
    assert moved > 1e-2
    for name, tensor in reference.items():
        assert state[name].shape == tensor.shape
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=2e-5)


def test_ranks_micro_batches_stages_and_restarts_change_nothing(references, tmp_path):
    cases = [{"name": f"stage{stage}", "stage": stage, "rows": 1} for stage in (0, 1, 2, 3)]
    cases += [{"name": f"tied{stage}", "stage": stage, "model_type": "llama_tied"} for stage in (2, 3)]
    cases += [{"name": f"resumed{stage}", "stage": stage, "rows": 2, "stop_at": 2} for stage in (0, 2, 3)]
    states = spawn(3, tmp_path, cases)
    for case in cases:
        model_type = case.get("model_type", "llama")
        assert_same(states[case["name"]], references[model_type], model_type)
