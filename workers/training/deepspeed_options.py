"""DeepSpeed's own configuration: what our settings make of it, and what `distributed.deepspeed` may add."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import JsonValue, ValidationError

from workers.config import DistributedSettings, OptimizationSettings
from workers.errors import InputError

_WHERE = "distributed.deepspeed"
_ZERO = "zero_optimization"
_BATCHES = "training.samples_per_step, training.micro_batch_rows and distributed.num_workers"
# DeepSpeed's option -> the setting of ours that decides it already. Dots lead into sections.
DECIDED = {
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": _BATCHES,
    "managed_gradient_accumulation": _BATCHES,
    "gradient_clipping": "training.max_grad_norm",
    "gradient_allreduce_op": "nothing: a loss is the mean over the response tokens of all ranks",
    "bf16": "distributed.use_gpu",
    "bfloat16": "distributed.use_gpu",
    "fp16": "distributed.use_gpu",
    "torch_autocast": "distributed.use_gpu",
    "optimizer": "training.learning_rate, training.betas and training.weight_decay",
    "scheduler": "training.schedule, training.warmup_share and training.final_learning_rate_share",
    "zero_allow_untested_optimizer": "nothing: the optimizer is AdamW",
    "zero_force_ds_cpu_optimizer": "distributed.offload",
    "activation_checkpointing": "training.activation_checkpointing",
    "checkpoint": "run.checkpoint_every and run.num_to_keep",
    "steps_per_print": "run.log_every",
    "tensorboard": "run.tensorboard",
    "wandb": "run.tracker",
    "comet": "run.tracker",
    "csv_monitor": "nothing: metrics.jsonl is always written",
    "zero_optimization.stage": "distributed.zero_stage",
    "zero_optimization.offload_optimizer": "distributed.offload",
    "zero_optimization.offload_param": "distributed.offload",
    "zero_optimization.cpu_offload": "distributed.offload",
    "zero_optimization.cpu_offload_param": "distributed.offload",
    "zero_optimization.cpu_offload_use_pin_memory": "distributed.offload",
    "zero_optimization.compute_grad_norm": "training.max_grad_norm",
}
# Options that would do nothing, or something that this training is not made for.
UNUSED = {
    "aio": "nothing is offloaded to disk",
    "autotuning": "Ray Train starts the workers",
    "compile": "the model is not compiled by DeepSpeed",
    "data_efficiency": "Ray Data feeds the workers",
    "dataloader_drop_last": "Ray Data feeds the workers",
    "datastates_ckpt": "Ray Train keeps the checkpoints",
    "disable_allgather": "every ZeRO stage needs it",
    "expert_parallel": "each rank has all experts",
    "hybrid_engine": "nothing is generated while training",
    "pipeline": "there are no pipeline stages",
    "seq_parallel_communication_data_type": "sequences are not split over ranks",
    "tensor_parallel": "tensors are not split over ranks",
    "use_data_before_expert_parallelism": "each rank has all experts",
    "vocabulary_size": "it changes nothing",
    "weight_quantization": "weights are trained",
    "zero_optimization.elastic_checkpoint": "distributed.num_workers may differ on resume without it",
    "zero_optimization.legacy_stage1": "it was removed from DeepSpeed",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold float32 weights",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is AdamW",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "the export gathers the weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the export gathers the weights",
    "zero_optimization.zenflow": "the optimizer is AdamW on all parameters",
}
_NUMBER = (int, float)
# What each option may be: a type, some types, or one of several texts.
_SCALARS: dict[str, Any] = {
    "communication_data_type": ("fp16", "bf16", "fp32"),
    "disable_python_gc": bool,
    "dump_state": bool,
    "gradient_predivide_factor": _NUMBER,
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "memory_breakdown": bool,
    "prescale_gradients": bool,
    "wall_clock_breakdown": bool,
}
# Sections of which DeepSpeed reads these keys and ignores others, unchecked; what is in the rest is DeepSpeed's to check.
_SECTIONS: dict[str, dict[str, Any] | None] = {
    "comms_logger": None,
    "data_types": {"grad_accum_dtype": ("bf16", "fp32")},
    "flops_profiler": {
        "enabled": bool,
        "recompute_fwd_factor": _NUMBER,
        "profile_step": int,
        "module_depth": int,
        "top_modules": int,
        "detailed": bool,
        "output_file": (str, type(None)),
    },
    "timers": {"throughput": dict},
    _ZERO: None,
}
ACCEPTED = (*_SCALARS, *_SECTIONS)


def deepspeed_config(
    optimization: OptimizationSettings, distributed: DistributedSettings, num_parameters: int
) -> dict[str, Any]:
    """DeepSpeed's own settings for one stage, `distributed.deepspeed` merged into them.

    Gradient accumulation is left to the caller (`managed_gradient_accumulation`): a step has as many micro-batches as its samples
    fill, and `step()` is its border. With bf16 weights the gradients of the micro-batches are summed in float32: a bf16 sum stops
    growing when the next summand is below 1/256 of it. Without ZeRO DeepSpeed sums bf16 gradients in bf16 only.

    Args:
        num_parameters: those that are trained.
    """
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optimization.max_grad_norm,
        "bf16": {"enabled": distributed.use_gpu},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own CPU Adam would have to be compiled
        "steps_per_print": 2**31,
        _ZERO: {
            "stage": distributed.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(500_000_000, num_parameters),
            # Parameters below this stay whole on every rank: DeepSpeed's default would leave a small model unpartitioned.
            "stage3_param_persistence_threshold": min(100_000, num_parameters // 100),
            **_offload(distributed),
        },
    }
    if distributed.use_gpu and distributed.zero_stage:
        own["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(own, distributed.deepspeed)


def check_deepspeed_options(distributed: DistributedSettings) -> None:
    """Refuses what `distributed.deepspeed` may not hold. Imports DeepSpeed when it holds anything that may stand there.

    Raises:
        InputError: names the option, and the setting of ours that is meant for it.
    """
    if not distributed.deepspeed:
        return
    refuse_conflicts(distributed.deepspeed)
    _require_gradient_type(distributed)
    _require_plain_gradients(distributed)
    _ask_deepspeed(distributed)


def refuse_conflicts(options: Mapping[str, JsonValue]) -> None:
    """Refuses options that our settings decide, that have no use here, or whose name or type is wrong. DeepSpeed-free.

    Raises:
        InputError: names the option.
    """
    for key, value in options.items():
        _refuse_taken(key)
        _require_known(key, ACCEPTED, "")
        if key in _SCALARS:
            _require_kind(key, value, _SCALARS[key])
            continue
        if not isinstance(value, dict):
            raise InputError(f"{_WHERE}.{key}", repr(value), "a mapping of DeepSpeed's options")
        for name, inner in value.items():
            _refuse_taken(f"{key}.{name}")
            known = _SECTIONS[key]
            if known is not None:
                _require_known(name, known, f"{key}.")
                _require_kind(f"{key}.{name}", inner, known[name])


def _require_kind(option: str, value: JsonValue, kind: Any) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds and not (isinstance(value, str) and value in kinds):
        names = {dict: "a mapping of DeepSpeed's options", type(None): "null"}
        expected = " or ".join(names.get(each, each if isinstance(each, str) else each.__name__) for each in kinds)
        raise InputError(f"{_WHERE}.{option}", repr(value), expected)


def _require_gradient_type(distributed: DistributedSettings) -> None:
    """DeepSpeed sums float32 gradients in float32, bf16 ones without ZeRO in bf16, and with it in either."""
    section = distributed.deepspeed.get("data_types", {})
    assert isinstance(section, dict)
    found = section.get("grad_accum_dtype")
    possible = ["fp32"] if not distributed.use_gpu else ["fp32", "bf16"] if distributed.zero_stage else ["bf16"]
    if found is not None and found not in possible:
        raise InputError(
            f"{_WHERE}.data_types.grad_accum_dtype",
            str(found),
            f"{' or '.join(possible)} with distributed.use_gpu={str(distributed.use_gpu).lower()} and "
            f"distributed.zero_stage={distributed.zero_stage}",
        )


def _require_plain_gradients(distributed: DistributedSettings) -> None:
    """From ZeRO 2 on DeepSpeed takes no scaling of gradients with reduce_scatter; without it, ZeRO 3 scales them wrongly."""
    options = distributed.deepspeed
    section = options.get(_ZERO, {})
    assert isinstance(section, dict)
    factor = options.get("gradient_predivide_factor", 1.0)
    assert isinstance(factor, int | float)
    if factor <= 0:
        raise InputError(f"{_WHERE}.gradient_predivide_factor", str(factor), "a number above 0")
    is_scattering = distributed.zero_stage >= 2 and section.get("reduce_scatter", True)
    scatter = f"zero_optimization.reduce_scatter=true at distributed.zero_stage={distributed.zero_stage}"
    if is_scattering and options.get("prescale_gradients"):
        raise InputError(f"{_WHERE}.prescale_gradients", "true", f"false with {scatter}")
    if factor != 1 and (is_scattering or distributed.zero_stage == 3):
        reason = "at distributed.zero_stage=3" if distributed.zero_stage == 3 else f"with {scatter}"
        raise InputError(f"{_WHERE}.gradient_predivide_factor", str(factor), f"1 {reason}")


def _refuse_taken(option: str) -> None:
    where = f"{_WHERE}.{option}"
    if option in DECIDED:
        raise InputError(
            where, "an option that marsray sets", "no such option there", f"It is decided by {DECIDED[option]}."
        )
    if option in UNUSED:
        raise InputError(where, f"an option without use here ({UNUSED[option]})", "no such option there")


def _require_known(name: str, known: Iterable[str], prefix: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"Did you mean {close[0]}?" if close else ""
    raise InputError(
        f"{_WHERE}.{prefix}{name}", "an option that DeepSpeed does not know", ", ".join(sorted(known)), advice
    )


def _ask_deepspeed(distributed: DistributedSettings) -> None:
    """Lets DeepSpeed read the whole configuration, as it will on every rank."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero_options = distributed.deepspeed.get(_ZERO, {})
    assert isinstance(zero_options, dict)
    # By alias: an option under its second name would stand beside the same one of ours.
    known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    for name in zero_options:
        _require_known(name, [name for name in known if f"{_ZERO}.{name}" not in DECIDED | UNUSED], f"{_ZERO}.")
    if zero_options.get("overlap_comm") and distributed.zero_stage != 2:
        raise InputError(f"{_WHERE}.{_ZERO}.overlap_comm", "true", "false, or distributed.zero_stage=2")
    # One by one first: not every message of DeepSpeed says which option it is about.
    for key, value in distributed.deepspeed.items():
        parts = (
            [({name: inner}, f".{name}") for name, inner in value.items()] if isinstance(value, dict) else [(value, "")]
        )
        for part, name in parts:
            _build(distributed.model_copy(update={"deepspeed": {key: part}}), f"{_WHERE}.{key}{name}")
    _build(distributed, _WHERE)


def _build(distributed: DistributedSettings, where: str) -> None:
    """Lets DeepSpeed make its configuration of ours with some of the options, which `where` names."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        DeepSpeedConfig(deepspeed_config(OptimizationSettings(), distributed, num_parameters=1))
    except ValidationError as error:
        first = error.errors()[0]
        inner = "".join(f".{part}" for part in first["loc"] if not where.endswith(f".{part}"))
        raise InputError(f"{where}{inner}", repr(first["input"]), first["msg"]) from error
    except (ValueError, AssertionError, TypeError, AttributeError, LookupError, DeepSpeedConfigError) as error:
        raise InputError(where, str(error), "options that DeepSpeed accepts together") from error


def _offload(distributed: DistributedSettings) -> dict[str, Any]:
    # Pinned memory makes copies to a GPU faster; without one it has no use.
    to_cpu = {"device": "cpu", "pin_memory": distributed.use_gpu}
    return {
        "none": {},
        "optimizer": {"offload_optimizer": to_cpu},
        "optimizer_and_parameters": {"offload_optimizer": to_cpu, "offload_param": to_cpu},
    }[distributed.offload]


def _merged(own: dict[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(own)
    for key, value in added.items():
        both_are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both_are_sections else value
    return merged
