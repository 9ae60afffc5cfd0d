"""The held-out loss and the common stop of all ranks, in a little cluster of processes; the samples of each rank, from disk."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rank_processes import spawn_ranks, uneven_samples
from tiny_models import MASK_ID, tiny_model

from pipelines.held_out import HeldOutPlan, held_out_samples
from pipelines.sft_data import PreparedIndex, PreparedPart
from pipelines.sft_rows import PART_SCHEMA
from workers.config import DistributedSettings, OptimizationSettings
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.training.engine import build_engine
from workers.training.evaluation import HeldOut
from workers.training.loop import train
from workers.training.weights import full_state_dict

NUM_STEPS, NUM_RANKS = 4, 2
OBJECTIVE = MarsObjective(4, 0.5, 1.0, True, MASK_ID, seed=0)


def run_rank(rank: int, folder: str) -> None:
    results = {}
    for stage in (0, 3):
        for is_evaluating in (False, True):
            results[f"zero{stage}_{is_evaluating}"] = train_case(rank, stage, is_evaluating)
    results["stopped"] = train_case(rank, 3, True, stop_at=2)
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")


def train_case(rank: int, stage: int, is_evaluating: bool, stop_at: int | None = None) -> dict:
    """Trains with dropout, so that a draw of the evaluation would show, and with held-out samples on the first rank only."""
    torch.manual_seed(rank)
    model = tiny_model("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    settings = OptimizationSettings(learning_rate=1e-2, row_tokens=64, micro_batch_rows=1)
    distributed = DistributedSettings(num_workers=NUM_RANKS, zero_stage=stage)
    engine = build_engine(LossModule(model, OBJECTIVE, head_chunk=16), settings, distributed, NUM_STEPS)
    held_out = None
    if is_evaluating:
        mine = uneven_samples(99, 5) if rank == 0 else []
        held_out = HeldOut(mine, engine, OBJECTIVE, settings, every=2, at_checkpoints=True)
    lines, saved, asked = [], [], []

    def should_stop() -> bool:
        asked.append(True)
        return rank == 1 and len(asked) == stop_at  # one rank only: the others must hear of it

    done = train(
        engine,
        OBJECTIVE,
        iter([uneven_samples(step, 5)[rank::NUM_RANKS] for step in range(NUM_STEPS)]),
        settings,
        first_step=0,
        num_steps=NUM_STEPS,
        log_every=1,
        checkpoint_every=3,
        on_metrics=lambda metrics: lines.append(metrics.as_dict()),
        on_checkpoint=lambda done, metrics: saved.append((done, metrics.held_out_loss)),
        held_out=held_out,
        should_stop=should_stop,
    )
    assert model.training
    return {
        "done": done,
        "lines": lines,
        "saved": saved,
        "random": torch.get_rng_state(),
        "weights": full_state_dict(engine, model, stage),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("cluster")
    spawn_ranks(run_rank, NUM_RANKS, str(folder))
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_leaves_training_alone(results: dict[str, dict], stage: int) -> None:
    without, with_evaluation = results[f"zero{stage}_False"], results[f"zero{stage}_True"]
    assert torch.equal(without["random"], with_evaluation["random"])
    for name, weights in without["weights"].items():
        assert torch.equal(weights, with_evaluation["weights"][name]), name
    for plain, evaluated in zip(without["lines"], with_evaluation["lines"], strict=True):
        assert plain["loss"] == evaluated["loss"]
        assert plain["held_out_loss"] is plain["held_out_ar_loss"] is plain["held_out_mask_loss"] is None


@pytest.mark.parametrize("stage", [0, 3])
def test_the_held_out_loss_is_that_of_the_weights_alone(results: dict[str, dict], stage: int) -> None:
    """After the last step: computed one sample at a time, without ranks, ZeRO, packing or dropout."""
    result = results[f"zero{stage}_True"]
    model = tiny_model("llama")
    model.load_state_dict(result["weights"])
    module = LossModule(model.eval(), OBJECTIVE)
    batches = [OBJECTIVE.pack([sample], row_tokens=64, micro_batch_rows=1)[0] for sample in uneven_samples(99, 5)]
    with torch.no_grad():
        sums = [module(batch, module.num_chunks_of(batch)) for batch in batches]
    num_tokens = sum(batch.num_response_tokens for batch in batches)
    last = result["lines"][-1]
    assert last["held_out_ar_loss"] == pytest.approx(float(sum(s.ar_sum for s in sums)) / num_tokens, rel=1e-5)
    assert last["held_out_mask_loss"] == pytest.approx(float(sum(s.mask_sum for s in sums)) / num_tokens, rel=1e-5)
    assert last["held_out_loss"] == pytest.approx(0.5 * last["held_out_ar_loss"] + last["held_out_mask_loss"])


def test_it_is_there_each_so_many_steps_and_at_every_checkpoint(results: dict[str, dict]) -> None:
    result = results["zero3_True"]
    assert [line["step"] for line in result["lines"] if line["held_out_loss"] is not None] == [2, 3, 4]
    assert [done for done, _ in result["saved"]] == [3, 4]
    assert all(loss is not None for _, loss in result["saved"])


def test_a_stop_that_one_rank_hears_of_ends_all_after_the_same_step(results: dict[str, dict]) -> None:
    stopped, unbroken = results["stopped"], results["zero3_True"]
    assert stopped["done"] == 2
    assert unbroken["done"] == NUM_STEPS
    assert [line["loss"] for line in stopped["lines"]] == [line["loss"] for line in unbroken["lines"][:2]]
    assert stopped["saved"] == [(2, unbroken["lines"][1]["held_out_loss"])]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_share_the_first_samples_in_listing_order(world_size: int, tmp_path: Path) -> None:
    parts = []
    for file, num_rows in enumerate([3, 4, 5]):
        rows = [
            {"file": file, "row": row, "token_ids": [file, row, 7], "starts": [1], "ends": [3]}
            for row in range(num_rows)
        ]
        path = str(tmp_path / f"{file}.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema=PART_SCHEMA), path)
        parts.append(PreparedPart(path, num_rows, 3 * num_rows, 2 * num_rows))
    (tmp_path / "2.parquet").unlink()  # lies behind the first five and is not read
    index = PreparedIndex(tuple(parts), 12, 0, {}, "", ("0", "1", "2"))
    ranks = [held_out_samples(HeldOutPlan(index, 5, every=1), rank, world_size) for rank in range(world_size)]
    dealt = [ranks[position % world_size][position // world_size] for position in range(5)]
    assert [(sample.file, sample.row, sample.epoch) for sample in dealt] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 2, 0),
        (1, 0, 0),
        (1, 1, 0),
    ]
    assert sum(map(len, ranks)) == 5
