"""The update of an optimizer step is a function of its samples: not of ranks, micro-batches, ZeRO stage or where tensors lie.

All cases train the same few steps in real processes over gloo; each spawned cluster runs many of them.
"""

from pathlib import Path

import pytest
import torch
from rank_processes import spawn_ranks, uneven_samples
from tiny_models import MASK_ID, tiny_model

import workers.training.weights as weights_module
from workers.config import DistributedSettings, LoraSettings, OptimizationSettings
from workers.errors import InputError
from workers.models.loading import backbone_and_head
from workers.models.lora import add_adapters, merge_adapters
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample
from workers.training.checkpoint import load_training_state, save_training_state
from workers.training.engine import build_engine
from workers.training.loop import train
from workers.training.schedule import learning_rate_factor
from workers.training.weights import WeightError, full_state_dict

NUM_STEPS = 4
OBJECTIVE = MarsObjective(4, 1.0, 1.0, True, MASK_ID, seed=0)
SETTINGS = {"learning_rate": 1e-2, "warmup_share": 0.5, "row_tokens": 64, "micro_batch_rows": 8, "max_grad_norm": 0.5}
# All parameters spread, or ZeRO-3 would keep those of these small models whole.
OPTIONS = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
LORA = LoraSettings(rank=4)
# Absolute, for weights that move by more than 1e-2: float32 sums in another order are all that may differ. Adam divides
# by the size of a gradient, so that of a tiny one even this shows; the tied embedding has some that nearly cancel.
TOLERANCE, TIED_TOLERANCE = 1e-5, 3e-5


def samples_of_step(kind: str, step: int) -> list[Sample]:
    """`uneven`: five very unequal samples, two in the last step, so that of three ranks one is left without any. `eight`: eight."""
    return uneven_samples(step, 8 if kind == "eight" else 5 if step < NUM_STEPS - 1 else 2)


def run_cases(rank: int, world_size: int, folder: str, cases: list[dict]) -> None:
    """Trains once for each case and saves what comes out."""
    for case in cases:
        result = train_case(rank, world_size, Path(folder), **case)
        if rank == 0:
            torch.save(result, f"{folder}/{case['name']}.pt")


def train_case(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    name: str,
    stage: int,
    model_type: str = "llama",
    samples: str = "uneven",
    offload: str = "none",
    checkpointing: bool = False,
    lora: bool = False,
    stop_at: int | None = None,
    resume: str | None = None,
    faults: bool = False,
    **optimization,
) -> dict:
    """Trains `NUM_STEPS` steps and returns the weights, the metrics and a few facts.

    With `stop_at`, saves there and goes on from the file in a new engine; `resume` goes on from what another case has saved so.
    """
    settings = OptimizationSettings(**SETTINGS | optimization)
    distributed = DistributedSettings(num_workers=world_size, zero_stage=stage, offload=offload, deepspeed=OPTIONS)
    checkpoint = None if resume is None else folder / f"{resume}-checkpoint"
    first, metrics = 0, []
    for last in [stop_at, NUM_STEPS] if stop_at else [NUM_STEPS]:
        model = tiny_model(model_type).train()
        if lora:
            add_adapters(model, LORA, trained_token_id=MASK_ID, seed=0)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        engine = build_engine(LossModule(model, OBJECTIVE, head_chunk=16), settings, distributed, NUM_STEPS)
        if checkpoint is not None:
            scratch = folder / f"scratch-{rank}"
            (scratch / "of-a-killed-conversion").mkdir(parents=True, exist_ok=True)
            first = load_training_state(engine, checkpoint, scratch)
            is_converting = rank == 0 and resume is not None and stage > 0
            assert scratch.exists() != is_converting, "a conversion leaves something behind"
        train(
            engine,
            OBJECTIVE,
            iter([samples_of_step(samples, step)[rank::world_size] for step in range(first, last)]),
            settings,
            first_step=first,
            num_steps=last,
            log_every=1,
            checkpoint_every=100,
            on_metrics=metrics.append,
            on_checkpoint=lambda done, metrics: None,
        )
        if last == stop_at:
            checkpoint = folder / f"{name}-checkpoint"
            save_training_state(engine, checkpoint, num_steps_done=last)
            torch.distributed.barrier()
    if stage == 3:
        assert all(parameter.numel() == 0 for parameter in model.parameters()), "ZeRO-3 has kept parameters whole"
    state = full_state_dict(engine, model, stage)
    return {
        "state": state,
        "metrics": {entry.step: entry.as_dict() for entry in metrics},
        "moments": sum(entry["exp_avg"].numel() for entry in engine.basic_optimizer.state.values()),
        "errors": fault_errors(engine, model, stage) if faults else [],
    }


def fault_errors(engine, model, stage: int) -> list[str]:
    """What `full_state_dict` says when values of the second rank change between its look at the parts and the gathering."""
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = dict(model.named_parameters())[name]
    held = parameter.ds_tensor if stage == 3 else parameter
    gathered, errors = weights_module._gathered, []

    def corrupt(tensor, zero_stage):
        if tensor is parameter and torch.distributed.get_rank() == 1:
            held.data.view(-1)[7] += 1e-3
        return gathered(tensor, zero_stage)

    if stage == 3:
        weights_module._gathered = corrupt
    else:
        corrupt(parameter, stage)
    errors.append(error_of(engine, model, stage))
    weights_module._gathered = gathered
    held.data.view(-1)[7] = float("nan")
    errors.append(error_of(engine, model, stage))
    return errors


def error_of(engine, model, stage: int) -> str:
    try:
        full_state_dict(engine, model, stage)
    except (WeightError, InputError) as error:
        return f"{type(error).__name__} {error}"
    return "none"


def spawn(world_size: int, folder: Path, cases: list[dict]) -> dict[str, dict]:
    spawn_ranks(run_cases, world_size, world_size, str(folder), cases)
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}


def case(name: str, stage: int, **changes) -> dict:
    return {"name": name, "stage": stage, **changes}


# The two ranks come first: the others go on from what they save.
TWO_RANKS = [
    case("two_by_four", 2, samples="eight", row_tokens=2, micro_batch_rows=4),
    *(case(f"stage{stage}", stage, micro_batch_rows=1, faults=stage >= 2) for stage in (0, 1, 2, 3)),
    *(case(f"saved{stage}", stage, stop_at=2) for stage in (0, 1, 2)),
    case("saved3", 3, stop_at=2, offload="optimizer_and_parameters"),
    *(case(f"offload{stage}", stage, offload="optimizer") for stage in (1, 2, 3)),
    *(case(f"checkpointing{stage}", stage, checkpointing=True) for stage in (2, 3)),
    case("tied3", 3, model_type="llama_tied"),
    case("lora2", 2, lora=True, checkpointing=True),
    case("lora3", 3, lora=True, stop_at=2),
    case("lora_tied3", 3, lora=True, model_type="llama_tied"),
]
ONE_RANK = [
    case("reference", 0, row_tokens=512),
    case("reference_tied", 0, row_tokens=512, model_type="llama_tied"),
    case("reference_lora", 0, row_tokens=512, lora=True),
    case("reference_lora_tied", 0, row_tokens=512, lora=True, model_type="llama_tied"),
    case("unclipped", 0, row_tokens=512, max_grad_norm=1000.0),
    case("linear", 0, row_tokens=512, schedule="linear"),
    case("constant", 0, row_tokens=512, schedule="constant"),
    case("one_by_eight", 0, samples="eight", row_tokens=2, micro_batch_rows=8),
    case("four_micro_batches", 0, samples="eight", row_tokens=2, micro_batch_rows=2),
    *(case(f"fewer{stage}", stage, resume=f"saved{stage}") for stage in (0, 1, 2)),
    case("fewer3", 3, resume="saved3", offload="optimizer_and_parameters"),
]
THREE_RANKS = [
    *(case(f"third{stage}", stage, micro_batch_rows=1) for stage in (0, 3)),
    *(case(f"more{stage}", stage, resume=f"saved{stage}") for stage in (0, 1, 2)),
    case("more3", 3, resume="saved3", offload="optimizer_and_parameters"),
    case("more_lora3", 3, resume="lora3", lora=True),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """All cases on two, one and three ranks."""
    folder = tmp_path_factory.mktemp("cases")
    return spawn(2, folder, TWO_RANKS) | spawn(1, folder, ONE_RANK) | spawn(3, folder, THREE_RANKS)


def reference_of(case: dict) -> str:
    parts = ["reference", *(["lora"] if case.get("lora") else []), *(["tied"] if "model_type" in case else [])]
    return "_".join(parts)


def difference(results: dict, name: str, reference: str) -> float:
    state, expected = results[name]["state"], results[reference]["state"]
    assert state.keys() == expected.keys()
    assert all(state[key].shape == expected[key].shape for key in expected)
    return max((state[key] - expected[key]).abs().max().item() for key in expected)


def test_one_batch_cut_in_three_ways_gives_one_update(results):
    (batch,) = OBJECTIVE.pack(samples_of_step("eight", 0), row_tokens=2, micro_batch_rows=8)
    assert batch.token_ids_BL.shape[0] == 8
    assert len(OBJECTIVE.pack(samples_of_step("eight", 0), row_tokens=2, micro_batch_rows=2)) == 4
    assert difference(results, "two_by_four", "one_by_eight") < TOLERANCE
    assert difference(results, "four_micro_batches", "one_by_eight") < TOLERANCE


@pytest.mark.parametrize("case", [c for c in (*TWO_RANKS, *THREE_RANKS, *ONE_RANK[-4:]) if "samples" not in c], ids=str)
def test_ranks_stages_offload_checkpointing_and_restarts_change_nothing(results, case):
    reference = reference_of(case)
    start = tiny_model(case.get("model_type", "llama")).state_dict()
    moved = results[reference]["state"]
    assert max((moved[key] - start.get(key, 0)).abs().max().item() for key in moved) > 1e-2
    assert difference(results, case["name"], reference) < (TIED_TOLERANCE if "tied" in reference else TOLERANCE)
    expected = results[reference]["metrics"]
    for step, metrics in results[case["name"]]["metrics"].items():
        for name in ("loss", "ar_loss", "mask_loss", "grad_norm", "learning_rate"):
            assert metrics[name] == pytest.approx(expected[step][name], rel=1e-4), name


def test_gradients_are_clipped_to_the_norm_over_all_ranks(results):
    """Clipped by ranks of their own, the weights of several ranks would differ from those of one."""
    norms = [metrics["grad_norm"] for metrics in results["reference"]["metrics"].values()]
    assert all(norm > 2 * SETTINGS["max_grad_norm"] for norm in norms)
    assert difference(results, "unclipped", "reference") > 1e-3


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.75, 0.25]),
        ("linear", [1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3]),
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules(results, schedule, shares):
    settings = OptimizationSettings(schedule=schedule, warmup_share=0.4)
    assert [learning_rate_factor(step, 5, settings) for step in range(5)] == pytest.approx(shares)
    case = "reference" if schedule == "cosine" else schedule
    trained = OptimizationSettings(**SETTINGS, schedule=schedule)
    rates = [metrics["learning_rate"] for metrics in results[case]["metrics"].values()]
    assert rates == pytest.approx([1e-2 * learning_rate_factor(step, NUM_STEPS, trained) for step in range(NUM_STEPS)])


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_change_while_they_are_gathered_or_are_not_finite_end_the_export(results, stage):
    changed, not_finite = results[f"stage{stage}"]["errors"]
    assert changed.startswith("WeightError model.layers.1.mlp.up_proj.weight: gathered")
    assert not_finite.startswith(
        "InputError the trained weights, model.layers.1.mlp.up_proj.weight: found a number that"
    )


@pytest.mark.parametrize("model_type", ["llama", "llama_tied"])
def test_merged_adapters_give_the_logits_of_the_adapted_model(results, model_type):
    state = results["reference_lora" if model_type == "llama" else "reference_lora_tied"]["state"]
    adapted, start = tiny_model(model_type), tiny_model(model_type).state_dict()
    add_adapters(adapted, LORA, trained_token_id=MASK_ID, seed=1)
    adapted.load_state_dict(state)
    merged = merge_adapters(state, tiny_model(model_type), LORA, trained_token_id=MASK_ID)
    token_ids = torch.tensor([[3, 4, MASK_ID, 7, 5]])
    logits = merged(token_ids).logits
    torch.testing.assert_close(logits, adapted(token_ids).logits, rtol=0, atol=1e-5)
    backbone, head, transform = backbone_and_head(adapted)
    torch.testing.assert_close(transform(head(backbone(token_ids).last_hidden_state)), logits, rtol=0, atol=1e-5)
    assert (logits - tiny_model(model_type)(token_ids).logits).abs().max() > 1e-2
    weights = merged.state_dict()
    assert weights.keys() == start.keys()
    embedding, before = weights["model.embed_tokens.weight"], start["model.embed_tokens.weight"]
    assert torch.equal(embedding[:MASK_ID], before[:MASK_ID])
    assert (embedding[MASK_ID] - before[MASK_ID]).abs().max() > 1e-3
    assert torch.equal(weights["model.norm.weight"], start["model.norm.weight"])
    is_tied = merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert is_tied == (model_type == "llama_tied")
    for name, tensor in state.items():
        if name.endswith("base_layer.weight"):
            assert torch.equal(tensor, start[name.replace("token_adapter.", "").replace("base_layer.", "")]), name


def test_only_adapters_and_the_placeholder_have_optimizer_state(results):
    state = results["reference_lora"]["state"]
    trained = [tensor.numel() for name, tensor in state.items() if "lora_" in name or "trainable_tokens_delta" in name]
    assert results["reference_lora"]["moments"] == sum(trained) < sum(tensor.numel() for tensor in state.values()) / 2
