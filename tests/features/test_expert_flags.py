"""Flags of mixtures of experts: what is refused, and the words that say what to change."""

from __future__ import annotations

import argparse

import pytest

from mindspeed.checkpoint.architecture import check_architecture
from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.features import registry
from mindspeed.flags import flags_of

JOB = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_ffn_hidden_size": 32,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "seq_length": 16,
    "micro_batch_size": 1,
    "world_size": 4,
    "bf16": True,
    "moe_grouped_gemm": True,
    "moe_expert_capacity_factor": None,
    "transformer_impl": "transformer_engine",
    "add_bias_linear": False,
}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
GATHER = {"moe_token_dispatcher_type": "allgather"}
DENSE = {"num_experts": None}
DEEPSPEED = {"moe_model_type": "deepspeed_moe"}
MORE = ("moe_shared_expert_intermediate_size", "optimization_level", "use_flash_attn")
ONE = {"expert_model_parallel_size": 1}
AMPIPE = {"ampipe_degree": 2, "use_flash_attn": True}

# Every flag of experts, switched on where it may be.
FLAGS = {
    "async": {"moe_permutation_async_comm": True},
    "alltoall": {"moe_alltoall_overlap_comm": True},
    "allgather": {"moe_allgather_overlap_comm": True, **GATHER},
    "fb": {"moe_fb_overlap": True},
    "level0": {"moe_zero_memory": "level0"},
    "level1": {"moe_zero_memory": "level1", "moe_zero_memory_num_layers": 2},
    "adaptive": {"moe_adaptive_recompute_activation": True},
    "extended": {"moe_tp_extend_ep": True, **TP},
    "hierarchical": {"moe_alltoall_exchange": "dedup"},
    "groups": {"moe_experts_pipeline_degree": 2, **TP},
    "shared": {"n_shared_experts": 1},
    "pipe": {"use_pipe_experts": True},
    "deepspeed": DEEPSPEED,
    "dropless": {**DEEPSPEED, "moe_no_drop": True, "moe_dynamic_padding": True},
    "rearranged": {**DEEPSPEED, "enable_token_rearrange_opt": True},
    "ampipe": {**AMPIPE, **DEEPSPEED},
}

REFUSED = [
    # the dispatcher that a flag needs
    ({"moe_alltoall_overlap_comm": True, **GATHER}, "--moe-token-dispatcher-type alltoall"),
    ({"moe_allgather_overlap_comm": True}, "--moe-token-dispatcher-type allgather"),
    (
        {"moe_allgather_overlap_comm": True, "moe_alltoall_overlap_comm": True},
        "--moe-alltoall-overlap-comm",
    ),
    # nothing is sent
    ({"moe_alltoall_overlap_comm": True, **ONE}, "nothing is sent to experts"),
    ({"moe_allgather_overlap_comm": True, **GATHER, **ONE}, "nothing is sent to experts"),
    ({"moe_alltoall_overlap_comm": True, "moe_fb_overlap": True}, "cannot be combined"),
    # zero memory
    (
        {"moe_zero_memory": "level1", "moe_zero_memory_num_layers": 5},
        "a pipeline stage has 4 layers",
    ),
    (
        {
            "moe_zero_memory": "level1",
            "moe_zero_memory_num_layers": 3,
            "pipeline_model_parallel_size": 2,
        },
        "a pipeline stage has 2 layers",
    ),
    ({"moe_zero_memory": "level0", "moe_zero_memory_num_layers": 1}, "level1"),
    ({"moe_zero_memory_num_layers": 1}, "--moe-zero-memory level1"),
    ({"moe_zero_memory_num_layers": -1, "moe_zero_memory": "level1"}, "at least 0|from 0"),
    ({"moe_zero_memory": "level1", "moe_fb_overlap": True}, "--moe-fb-overlap"),
    ({"moe_adaptive_recompute_activation_scale": 0.0}, "greater than 0"),
    # experts over tensor-parallel ranks
    ({"moe_tp_extend_ep": True, **TP, "num_experts": 6}, "6 .*tensor 2 x expert 2 = 4"),
    (
        {"moe_tp_extend_ep": True, **TP, "expert_tensor_parallel_size": 2},
        "--expert-tensor-parallel-size 2",
    ),
    ({"moe_hierarchical_alltoallv": True, **TP}, "--moe-tp-extend-ep"),
    ({"moe_hierarchical_alltoallv": True}, "--tensor-model-parallel-size is 1"),
    # groups of experts
    ({"moe_experts_pipeline_degree": 1, **TP}, "1"),
    ({"moe_experts_pipeline_degree": 3, **TP}, "allowed: 2, 4"),
    ({"moe_experts_pipeline_degree": 2}, "expert tensor parallel size is 1"),
    # one expert at a time
    ({"use_pipe_experts": True, "pipe_experts_multi_data": 0}, "--pipe-experts-multi-data"),
    ({"use_pipe_experts": True, "pipe_experts_multi_stream": True}, "--sequence-parallel"),
    ({"pipe_experts_multi_data": 2}, "add --use-pipe-experts"),
    # attention and experts in parts
    ({**AMPIPE, **DEEPSPEED, "ampipe_degree": 3}, "--ampipe-degree 3"),
    ({**AMPIPE, **TP, "seq_length": 18}, "--seq-length 18 is not divisible by 4 "),
    ({**AMPIPE, "context_parallel_size": 2}, "add --context-parallel-algo kvallgather_cp_algo"),
    # DeepSpeed's gates
    ({"moe_dynamic_padding": True, **DEEPSPEED}, "add --moe-no-drop"),
    ({**DEEPSPEED, "moe_router_topk": 3}, "top-1 and top-2"),
    ({"noisy_gate_policy": "RSample"}, "--moe-input-jitter-eps"),
    ({**DEEPSPEED, "moe_train_capacity_factor": 0.0}, "greater than 0"),
    # Megatron's own
    ({"moe_token_dispatcher_type": "alltoall_seq"}, "removed.*use alltoall.*--moe-tp-extend-ep"),
    ({"moe_router_topk": 9}, "--moe-router-topk 9: is more than --num-experts 8"),
    ({"moe_expert_capacity_factor": 0.0}, "every token is dropped"),
    ({"n_shared_experts": 0}, "--n-shared-experts"),
    ({"n_shared_experts": 2, "moe_shared_expert_intermediate_size": 65}, "64.*65"),
    ({"moe_alltoall_overlap_comm": True, **TP, "sequence_parallel": False}, "--sequence-parallel"),
]


def resolve(flags):
    known = {item.name for feature in registry.all_features() for item in flags_of(feature)}
    assert set(flags) <= {*JOB, *known, *MORE}
    return registry.resolve({**JOB, **flags}, "cpu")


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_flag_that_fits_is_taken(flags):
    assert resolve(flags).enabled


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_flag_of_experts_needs_experts(flags):
    with pytest.raises(ConfigError) as raised:
        resolve({**flags, **DENSE})
    message = str(raised.value)
    assert "--num-experts" in message
    assert any("--" + name.replace("_", "-") in message for name in flags)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_flag_of_a_higher_level_is_refused_by_name(flags):
    with pytest.raises(ConfigError, match="--optimization-level"):
        resolve({**flags, "optimization_level": 1})


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_misuse_is_refused_with_the_flags_and_their_values(flags, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        resolve(flags)


def test_a_checkpoint_with_another_number_of_experts_is_refused_with_both():
    ours = argparse.Namespace(num_experts=8, group_query_attention=False)
    saved = argparse.Namespace(num_experts=4, group_query_attention=False)
    with pytest.raises(CheckpointError, match="--num-experts: 4 in the checkpoint, now 8"):
        check_architecture(ours, saved, "run/iter_0000010")
