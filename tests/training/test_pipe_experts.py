"""``--use-pipe-experts`` in the trainer: the losses of one rank."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from tests.training.one_rank import assert_same_training, column
from tests.training.test_layouts import MOE, MTP, PP, TP

PIPE = "--use-pipe-experts --expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SLICED = f"{TP} --sequence-parallel {PIPE} --pipe-experts-multi-data 2"
LAYOUTS = {
    "overlap": (2, MOE, f"{PIPE} --pipe-experts-multi-data 2 {OVERLAP}"),
    "streams": (4, MOE, f"{SLICED} --pipe-experts-multi-stream {OVERLAP}"),
    "one-expert-full-recompute": (4, MOE, f"{PIPE[:-1]}4 --pipe-experts-multi-data 2 {FULL}"),
    "local-sequential-pipeline": (
        4,
        MOE.replace("--moe-grouped-gemm ", "--transformer-impl local "),
        f"{PIPE} {PP} --num-layers-per-virtual-pipeline-stage 1",
    ),
    "deepspeed-padded": (
        2,
        f"{MOE} --moe-model-type deepspeed_moe --moe-train-capacity-factor 8",
        f"{PIPE} --pipe-experts-multi-data 3 {OVERLAP}",
    ),
    "divided-backward": (
        4,
        MOE,
        f"{PIPE} {PP} --num-layers-per-virtual-pipeline-stage 1 --use-nanopipe",
    ),
    "mtp-recompute": (
        2,
        f"{MOE} {MTP}",
        f"{PIPE} --recompute-granularity selective --recompute-modules moe moe_act",
    ),
}


@pytest.mark.weekly_cases(
    "deepspeed-padded", "one-expert-full-recompute", "divided-backward", "mtp-recompute", "overlap"
)  # in test_deepspeed_moe.py
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_rank(layout, one_rank):
    world_size, model, flags = LAYOUTS[layout]
    reference = one_rank(model)
    records = reference.train(world_size, flags)
    assert_same_training(records, reference.records)


@pytest.mark.weekly
@pytest.mark.slow
def test_adapters_of_experts(one_rank):
    lora = "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 --lr 0.05"
    reference = one_rank(MOE)
    expected = reference.train(2, f"{lora} --expert-model-parallel-size 2 {OVERLAP}")
    records = reference.train(2, f"{lora} {PIPE} --pipe-experts-multi-data 2 {OVERLAP}")
    assert column(records, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=1e-6)


MEGATRON = {
    "num_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "use_pipe_experts": True,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": None}, "--use-pipe-experts: the model has no experts"),
        ({"expert_model_parallel_size": 1}, "nothing is sent to experts"),
        (
            {"use_pipe_experts": False, "pipe_experts_multi_data": 2},
            "--pipe-experts-multi-data: is a part of --use-pipe-experts",
        ),
        ({"pipe_experts_multi_data": 0}, "--pipe-experts-multi-data"),
        ({"pipe_experts_multi_stream": True}, "add --sequence-parallel"),
        ({"moe_token_dispatcher_type": "allgather"}, "the dispatcher is allgather"),
        ({"moe_zero_memory": "level0"}, "moe-zero-memory"),
        (
            {
                "pipe_experts_multi_data": 9,
                "seq_length": 16,
                "micro_batch_size": 1,
                "moe_router_topk": 2,
                "moe_expert_capacity_factor": 1.0,
                "moe_pad_expert_input_to_capacity": True,
            },
            "9: is more than the 8 rows that each expert has; choose 1 to 8",
        ),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
    ],
)
def test_what_cannot_work_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        registry.resolve(MEGATRON | changes, "cpu")
