"""Typed values of a job against the arithmetic of their names."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest
import torch

from mindspeed.flags import changed, flag, read
from mindspeed.job import (
    Batch,
    MixtureOfExperts,
    OptimizerStates,
    Parallel,
    Precision,
    Schedule,
    Sharding,
    TrainState,
)


def batch_args(**changes):
    values = {
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "data_parallel_size": 4,
        "rampup_batch_size": None,
        "train_iters": 10,
        "train_samples": None,
        "decrease_batch_size_if_needed": False,
        "lr_decay_iters": None,
        "lr_warmup_iters": 2,
        "lr_wsd_decay_iters": None,
        "lr_decay_samples": None,
        "lr_warmup_samples": 7,
        "lr_wsd_decay_samples": None,
        "lr_warmup_fraction": None,
        "eval_interval": None,
        "eval_iters": 0,
    }
    return argparse.Namespace(**values | changes)


def test_sizes_of_the_parallel_groups():
    whole = Parallel(
        world=64, tensor=2, pipeline=4, context=2, data=4, expert=4, expert_tensor=1, chunks=2
    )
    assert whole.model == 16
    assert whole.expert_data == 4
    assert [whole.first_rank_of(stage) for stage in range(4)] == [0, 16, 32, 48]
    inner = Parallel(world=64, tensor=2, pipeline=4, context=2, data=4, pipeline_innermost=True)
    assert [inner.first_rank_of(stage) for stage in range(4)] == [0, 4, 8, 12]


def test_samples_of_a_step():
    batch = Batch.of(batch_args())
    assert batch.micro_batches == 4
    assert batch.samples_of(3) == 24


@pytest.mark.parametrize("samples", [8, 24, 95, 96, 97, 500])
@pytest.mark.parametrize("ramp", [None, [8, 8, 96], [16, 16, 40]])
def test_iterations_consume_the_samples(samples, ramp):
    """A step more would consume more than there are, once the batch has its full size."""
    from mindspeed.training.resolve_run import iterations_of

    args = batch_args(train_iters=None, train_samples=samples, rampup_batch_size=ramp)
    sizes = []
    while ramp and sum(sizes) <= min(ramp[2], samples):
        growth = int(sum(sizes) / (ramp[2] / ((32 - ramp[0]) // ramp[1])))
        sizes.append(ramp[0] + growth * ramp[1])
    assert iterations_of(args) == len(sizes) + max(0, samples - sum(sizes)) // 32


@pytest.mark.parametrize(
    ("flags", "name", "products", "element"),
    [
        ({}, "fp32", "fp32", 4),
        ({"bf16": True}, "bf16", "bf16", 2),
        ({"fp16": True}, "fp16", "fp16", 2),
        ({"bf16": True, "fp8": "hybrid"}, "bf16", "fp8", 2),
    ],
)
def test_precision(flags, name, products, element):
    args = argparse.Namespace(**{"bf16": False, "fp16": False, "fp8": None} | flags)
    found = Precision.of(args)
    assert (found.name, found.products, found.element) == (name, products, element)
    assert found.narrow is (element == 2)


def test_schedules_are_in_samples():
    by_steps = Schedule.of(batch_args(lr_decay_iters=8, lr_wsd_decay_iters=3))
    assert (by_steps.samples, by_steps.warmup, by_steps.decay) == (320, 64, 256)
    assert by_steps.last_decay == 96
    by_samples = Schedule.of(batch_args(train_samples=300, lr_decay_samples=200))
    assert (by_samples.samples, by_samples.warmup, by_samples.decay) == (300, 7, 200)
    assert by_samples.last_decay is None
    assert Schedule.of(batch_args(lr_warmup_fraction=0.25)).warmup == 80


def test_a_state_counts_and_is_read_back():
    state = TrainState().after_step(32).after_step(32).after_evaluation(8)
    assert state == TrainState(iteration=2, train_samples=64, valid_samples=8)
    assert TrainState.of(2, argparse.Namespace(**state.saved())) == state
    assert TrainState.of(5, argparse.Namespace()) == TrainState(iteration=5)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, Sharding()),
        ({"use_distributed_optimizer": True}, Sharding(distributed_optimizer=True)),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
            Sharding(stage=2),
        ),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
            Sharding(stage=3),
        ),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, Sharding()),  # only of FSDP
        ({"overlap_grad_reduce": True}, Sharding(overlap_gradients=True)),
        ({"overlap_param_gather": True}, Sharding(overlap_parameters=True)),
        ({"align_grad_reduce": False}, Sharding(align_gradients=False)),
        ({"align_param_gather": True}, Sharding(align_parameters=True)),
        ({"overlap_param_gather_with_optimizer_step": True}, Sharding(gather_in_step=True)),
    ],
)
def test_what_data_parallel_ranks_share(flags, expected):
    args = argparse.Namespace(**{"use_distributed_optimizer": False} | flags)
    found = Sharding.of(args)
    assert found == expected
    assert found.fsdp is (found.stage > 1)


@pytest.mark.parametrize(
    ("flags", "narrow", "offloaded"),
    [
        ({}, False, False),
        ({"reuse_fp32_param": True}, True, False),
        ({"store_param_remainders": True}, False, False),  # only where Adam is the precise one
        ({"store_param_remainders": True, "use_precision_aware_optimizer": True}, True, False),
        ({"main_params_dtype": torch.float16}, True, False),
        ({"swap_optimizer": True}, False, True),
        ({"virtual_optimizer": ("all",)}, False, True),
        ({"optimizer_cpu_offload": True}, False, True),
    ],
)
def test_what_an_optimizer_keeps(flags, narrow, offloaded):
    values = {
        "optimizer": "adam", "exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.uint8,
        "main_params_dtype": torch.float32, "quant_states": False, "quant_states_exempt": (),
        "reuse_fp32_param": False, "use_precision_aware_optimizer": False, "bf16": True,
        "store_param_remainders": False, "swap_optimizer": False, "virtual_optimizer": (),
        "optimizer_cpu_offload": False, "accumulate_allreduce_grads_in_fp32": True,
    }  # fmt: skip
    found = OptimizerStates.of(argparse.Namespace(**values | flags))
    assert (found.half_master, found.offloaded) == (narrow, offloaded)
    assert (found.moments, found.gradient) == ((torch.float32, torch.uint8), 4)


def test_a_model_without_experts_has_none_and_no_other_values():
    found = MixtureOfExperts.of(argparse.Namespace(num_experts=None))
    assert found == MixtureOfExperts(0, 0, 1, 1, False, "")
    grouped = argparse.Namespace(num_experts=8, moe_router_topk=2, moe_router_num_groups=4)
    assert MixtureOfExperts.of(grouped) == MixtureOfExperts(8, 2, 4, 1, False, "")


@dataclass(frozen=True)
class Section:
    """Some flags."""

    width: int = flag(4, "w")
    depth: int = flag(2, "d")


def test_a_section_is_read_and_what_a_namespace_lacks_is_the_default():
    assert read(Section, argparse.Namespace(width=8, other=1)) == Section(width=8, depth=2)
    assert read(Section, argparse.Namespace(width=8, depth=None)).depth is None  # as it was set


@dataclass(frozen=True)
class Plain:
    """Values of others' flags."""

    width: int
    depth: int = 2


def test_any_dataclass_is_read_and_a_value_without_a_default_must_be_there():
    assert read(Plain, argparse.Namespace(width=8, other=1)) == Plain(8, 2)
    with pytest.raises(TypeError, match="width"):
        read(Plain, argparse.Namespace(depth=1))


def test_a_copy_with_other_values_leaves_the_namespace():
    args = argparse.Namespace(width=8, depth=2)
    copied = changed(args, width=1, more=3)
    assert vars(copied) == {"width": 1, "depth": 2, "more": 3}
    assert vars(args) == {"width": 8, "depth": 2}
