"""``--ampipe-degree`` in the trainer: the losses of one rank without it."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from tests.training.one_rank import assert_same_training, column
from tests.training.test_layouts import MOE, MTP, PP, TP

CHUNKS = "--ampipe-degree 4 --expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SEQUENCE = f"{TP} --sequence-parallel --ampipe-degree 2 --expert-model-parallel-size 2"
GATHERED = "--context-parallel-size 2 --context-parallel-algo kvallgather_cp_algo"
GATHERED_ARGUMENTS = {
    "context_parallel_size": 2,
    "context_parallel_algo": "kvallgather_cp_algo",
}
LOSS = MOE.replace("balancing-type none", "balancing-type aux_loss --moe-aux-loss-coeff 0.01")
LOCAL = f"{MOE.replace('--moe-grouped-gemm', '')} --transformer-impl local"
LAYOUTS = {
    "overlap": (2, MOE, f"{CHUNKS} {OVERLAP}"),
    "sliced-experts": (4, MOE, f"{SEQUENCE} --ampipe-tp-sp-comm-overlap {OVERLAP}"),
    "whole-experts-full-recompute": (
        2,
        MOE,
        f"{SEQUENCE} --expert-tensor-parallel-size 1 {FULL}",
    ),
    "local-virtual-pipeline": (
        4,
        LOCAL,
        f"{CHUNKS} {PP} --num-layers-per-virtual-pipeline-stage 1",
    ),
    "divided-backward": (4, MOE, f"{CHUNKS} {PP} --pipeline-schedule zb-h1"),
    "mtp-core-attention": (
        2,
        f"{MOE} {MTP}",
        f"{CHUNKS} --recompute-granularity selective --recompute-modules core_attn moe_act",
    ),
    "flash-alternating": (
        2,
        f"{MOE} --moe-layer-freq [0,1,0,1]",
        f"{CHUNKS} --use-flash-attn --moe-alltoall-overlap-comm",
    ),
    "context-parallel": (2, MOE, f"{CHUNKS} {GATHERED}"),
    "context-and-tensor-parallel": (4, MOE, f"{SEQUENCE} {GATHERED} {OVERLAP}"),
    "context-parallel-local-recompute": (2, LOCAL, f"{CHUNKS} {GATHERED} {FULL}"),
    "context-parallel-core-attention": (
        2,
        f"{MOE} {MTP}",
        f"{CHUNKS} {GATHERED} --recompute-granularity selective --recompute-modules core_attn",
    ),
}


@pytest.mark.weekly_cases(
    "context-parallel",
    "context-parallel-core-attention",
    "overlap",
    "whole-experts-full-recompute",
    "local-virtual-pipeline",
    "divided-backward",
    "flash-alternating",
    "mtp-core-attention",
    "context-parallel-local-recompute",
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_rank(layout, one_rank):
    world_size, model, flags = LAYOUTS[layout]
    reference = one_rank(model)
    records = reference.train(world_size, flags)
    assert_same_training(records, reference.records)


@pytest.mark.slow
def test_load_balancing_loss_is_that_of_the_layer_in_one_piece(one_rank):
    """Of the same layout: a rank's loss is a product of means over its own samples."""
    reference = one_rank(LOSS)
    layout = f"{SEQUENCE.replace('--ampipe-degree 2', '')} --expert-tensor-parallel-size 1"
    expected = reference.train(2, layout)
    records = reference.train(2, f"{layout} --ampipe-degree 4")
    assert column(records, "load_balancing_loss") == pytest.approx(
        column(expected, "load_balancing_loss"), rel=1e-6
    )
    assert column(records, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=1e-6)


@pytest.mark.weekly
@pytest.mark.slow
def test_adapters_of_experts(one_rank):
    lora = "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 --lr 0.05"
    reference = one_rank(MOE)
    expected = reference.train(2, f"{lora} --expert-model-parallel-size 2 {OVERLAP}")
    records = reference.train(2, f"{lora} {CHUNKS} {OVERLAP}")
    assert column(records, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=1e-6)


MEGATRON = {
    "num_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "seq_length": 64,
    "ampipe_degree": 2,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": None}, "--ampipe-degree 2: the model has no experts"),
        ({"expert_model_parallel_size": 1}, "nothing is sent by all-to-all"),
        ({"ampipe_degree": 3}, "--seq-length 64 is not divisible by 3"),
        (
            {"ampipe_degree": 32, "tensor_model_parallel_size": 4, "sequence_parallel": True},
            r"not divisible by 128 \(--ampipe-degree 32 x --tensor-model-parallel-size 4\)",
        ),
        ({"ampipe_degree": 1, "ampipe_tp_sp_comm_overlap": True}, "is a part of --ampipe-degree"),
        ({"ampipe_tp_sp_comm_overlap": True}, "add --sequence-parallel"),
        ({"context_parallel_size": 2}, "add --context-parallel-algo kvallgather_cp_algo"),
        ({**GATHERED_ARGUMENTS, "ampipe_degree": 3, "seq_length": 48}, "is odd"),
        (
            {**GATHERED_ARGUMENTS, "ampipe_degree": 64},
            r"not divisible by 128 \(--ampipe-degree 64 x --context-parallel-size 2\)",
        ),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"moe_token_dispatcher_type": "allgather"}, "the dispatcher is allgather"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
            "--recompute-modules moe",
        ),
        ({"use_pipe_experts": True}, "pipe-experts"),
    ],
)
def test_what_cannot_work_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        registry.resolve(MEGATRON | changes, "cpu")
