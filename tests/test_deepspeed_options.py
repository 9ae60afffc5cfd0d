"""What `distributed.deepspeed` may hold: a typo or a clash is refused by name, and nothing is ignored silently."""

import copy
import sys
from typing import Any

import pytest

from workers.config import DistributedSettings, OptimizationSettings
from workers.errors import InputError
from workers.training.deepspeed_options import (
    ACCEPTED,
    DECIDED,
    UNUSED,
    check_deepspeed_options,
    deepspeed_config,
    refuse_conflicts,
)


def settings(options: dict, **changes) -> DistributedSettings:
    return DistributedSettings(**{"zero_stage": 2, "deepspeed": options, **changes})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_batch_size": 8}, r"distributed\.deepspeed\.train_batch_size: .*training\.samples_per_step"),
        ({"gradient_clipping": 1.0}, r"deepspeed\.gradient_clipping: .*training\.max_grad_norm"),
        ({"bf16": {"enabled": True}}, r"deepspeed\.bf16: .*distributed\.use_gpu"),
        ({"optimizer": {"type": "Adam"}}, r"deepspeed\.optimizer: .*training\.learning_rate"),
        ({"scheduler": {}}, r"deepspeed\.scheduler: .*training\.schedule"),
        (
            {"activation_checkpointing": {}},
            r"deepspeed\.activation_checkpointing: .*training\.activation_checkpointing",
        ),
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization\.stage: .*distributed\.zero_stage"),
        ({"zero_optimization": {"offload_param": {}}}, r"zero_optimization\.offload_param: .*distributed\.offload"),
        ({"aio": {}}, r"deepspeed\.aio: found an option without use here"),
        ({"zero_optimisation": {}}, r"deepspeed\.zero_optimisation: .*Did you mean zero_optimization\?"),
        ({"flops_profiler": {"enable": True}}, r"flops_profiler\.enable: .*Did you mean enabled\?"),
        ({"wall_clock_breakdown": "yes"}, r"wall_clock_breakdown: found 'yes'; expected bool"),
        ({"wall_clock_breakdown": 1}, r"wall_clock_breakdown: found 1; expected bool"),
        ({"zero_optimization": True}, r"zero_optimization: found True; expected a mapping"),
        ({"log_level": "loud"}, r"deepspeed\.log_level: found 'loud'; expected debug or info or"),
        ({"communication_data_type": "fp8"}, r"communication_data_type: found 'fp8'; expected fp16 or bf16 or fp32"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, r"data_types\.grad_accum_dtype: found 'fp16'; expected bf16 or"),
        ({"flops_profiler": {"enabled": 1}}, r"flops_profiler\.enabled: found 1; expected bool"),
        ({"flops_profiler": {"output_file": 1}}, r"flops_profiler\.output_file: found 1; expected str or null"),
        ({"timers": {"throughput": True}}, r"timers\.throughput: found True; expected a mapping"),
    ],
)
def test_clashes_are_refused_without_deepspeed(options, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(InputError, match=words):
        refuse_conflicts(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_optimization": {"reduce_bucket": 1}}, r"reduce_bucket: .*Did you mean reduce_bucket_size\?"),
        (
            {"zero_optimization": {"param_persistence_threshold": 1}},
            r"param_persistence_threshold: .*Did you mean stage3_param_persistence_threshold\?",
        ),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, r"reduce_bucket_size: found -1; expected .*greater than 0"),
        ({"zero_optimization": {"reduce_scatter": "perhaps"}}, r"reduce_scatter: found 'perhaps'"),
        ({"zero_optimization": {"leaf_module": {"clases": []}}}, r"leaf_module\.clases"),
        ({"comms_logger": {"enabeld": True}}, r"enabeld"),
        ({"timers": {"throughput": {"enabeld": True}}}, r"enabeld"),
        ({"comms_logger": {"prof_ops": 1}}, r"^distributed\.deepspeed\.comms_logger\.prof_ops: found 1"),
        ({"zero_optimization": {"leaf_module": 1}}, r"^distributed\.deepspeed\.zero_optimization\.leaf_module: "),
    ],
)
def test_what_deepspeed_refuses_is_refused_before_the_run(options, words):
    with pytest.raises(InputError, match=words):
        check_deepspeed_options(settings(options))


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"prescale_gradients": True}, [0, 1]),
        ({"gradient_predivide_factor": 2}, [0, 1]),
        ({"prescale_gradients": True, "zero_optimization": {"reduce_scatter": False}}, [0, 1, 2, 3]),
        # ZeRO 3 would halve the gradients.
        ({"gradient_predivide_factor": 2, "zero_optimization": {"reduce_scatter": False}}, [0, 1, 2]),
    ],
)
def test_gradients_are_scaled_only_where_deepspeed_can(options, stages):
    for stage in range(4):
        if stage in stages:
            check_deepspeed_options(settings(options, zero_stage=stage))
        else:
            name = next(iter(options))
            with pytest.raises(InputError, match=rf"deepspeed\.{name}: found .*distributed\.zero_stage={stage}"):
                check_deepspeed_options(settings(options, zero_stage=stage))
    with pytest.raises(InputError, match=r"gradient_predivide_factor: found 0; expected a number above 0"):
        check_deepspeed_options(settings({"gradient_predivide_factor": 0}))


@pytest.mark.parametrize(
    ("use_gpu", "zero_stage", "possible"), [(False, 2, {"fp32"}), (True, 0, {"bf16"}), (True, 1, {"bf16", "fp32"})]
)
def test_gradients_are_summed_in_a_type_that_deepspeed_can_sum_them_in(use_gpu, zero_stage, possible):
    for dtype in ("bf16", "fp32"):
        distributed = settings({"data_types": {"grad_accum_dtype": dtype}}, use_gpu=use_gpu, zero_stage=zero_stage)
        if dtype in possible:
            check_deepspeed_options(distributed)
            config = deepspeed_config(OptimizationSettings(), distributed, num_parameters=1)
            assert config["data_types"]["grad_accum_dtype"] == dtype
        else:
            with pytest.raises(InputError, match=rf"grad_accum_dtype: found {dtype}; expected .*use_gpu"):
                check_deepspeed_options(distributed)


def test_overlapping_communication_needs_stage_2():
    options = {"zero_optimization": {"overlap_comm": True}}
    check_deepspeed_options(settings(options))
    with pytest.raises(InputError, match=r"overlap_comm: .*distributed\.zero_stage=2"):
        check_deepspeed_options(settings(options, zero_stage=3))


def test_options_are_merged_into_ours():
    options = {"zero_optimization": {"stage3_param_persistence_threshold": 7}, "wall_clock_breakdown": True}
    distributed = settings(options, zero_stage=3, offload="optimizer_and_parameters")
    check_deepspeed_options(distributed)
    config = deepspeed_config(OptimizationSettings(max_grad_norm=0.5), distributed, num_parameters=1000)
    to_cpu = {"device": "cpu", "pin_memory": False}
    assert config["wall_clock_breakdown"] is True
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 1000,
        "stage3_param_persistence_threshold": 7,
        "offload_optimizer": to_cpu,
        "offload_param": to_cpu,
    }


def test_every_option_that_deepspeed_reads_has_been_thought_of():
    """A newer DeepSpeed with further options makes this fail: then each has to be accepted or refused."""
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    read: set[str] = set()

    class Recording(dict):
        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def keys(self) -> Any:
            return self

        def __copy__(self) -> "Recording":
            return self

    DeepSpeedConfig(copy.copy(Recording(train_micro_batch_size_per_gpu=1)))
    known = {*ACCEPTED, *DECIDED, *UNUSED}
    top_level = {name for name in known if "." not in name}
    assert read - set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) - {"sequence_parallel_size"} == top_level
    zero = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    ours = {name.removeprefix("zero_optimization.") for name in known if name.startswith("zero_optimization.")}
    assert ours <= zero
