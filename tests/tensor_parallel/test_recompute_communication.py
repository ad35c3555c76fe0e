"""Recomputation without communication: equal to no recomputation to the bit."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.features.memory.recompute_communication import RecomputeCommunication
from tests.memory import memory_ranks
from tests.support.lazy import needs
from tests.tensor_parallel import region_ranks
from tests.tensor_parallel.region_ranks import FULL, MLP, flags

needs("megatron.core")

SETUP = "tests.support.warm"
BLOCK = {**FULL, "recompute_method": "block"}
WAYS = {
    "full 1": flags(FULL, 1),
    "full 2": flags(FULL, 2),
    "block": flags(BLOCK, 2),
    "selective": flags(MLP, 1),
}
FUSED = {"bias_dropout_fusion": True}
SP, DROPOUT = {"sequence_parallel": True}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES = {
    "dense": ("rmsnorm-swiglu-gqa", "te", 1, {}, {}),
    "bias, dropout, TP": ("layernorm-gelu-bias", "te", 2, DROPOUT, {}),
    "bias, SP, two passes": ("layernorm-gelu-bias", "te", 2, SP, {"passes": 2}),
    "local spec, dropout, SP": ("layernorm-gelu-bias", "local", 2, SP | DROPOUT, {}),
    "fused bias-dropout-add": ("rmsnorm-swiglu-gqa", "te", 2, SP | FUSED, {}),
    "fp32 residuals": (
        "rmsnorm-swiglu-gqa", "te", 2, SP | {"fp32_residual_connection": True}, {}
    ),
    "latent attention": ("mla", "te", 2, SP, {}),
    "frozen layers": ("rmsnorm-swiglu-gqa", "te", 2, SP, {"frozen": "layers.0"}),
    "frozen weights": ("rmsnorm-swiglu-gqa", "te", 2, SP, {"frozen": "linear_"}),
    "adapters": (
        "rmsnorm-swiglu-gqa", "te", 2, SP | DROPOUT,
        {"lora": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")},
    ),
    "adapters, one rank": (
        "rmsnorm-swiglu-gqa", "local", 1, {}, {"lora": ("linear_proj", "linear_fc2")}
    ),
}  # fmt: skip


@pytest.mark.weekly_cases("bias, dropout, TP", "fp32 residuals")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_without_recomputation_to_the_bit(ranks, case):
    name, spec, size, overrides, more = CASES[case]
    for found in ranks(
        size, region_ranks.compared, name, spec, WAYS, overrides, more, setup=SETUP, timeout=240
    ):
        for title in WAYS:
            assert found[title]["differ"] == [], title
        if size == 1:
            continue
        reduces = "reduce_scatter" if "sequence_parallel" in overrides else "all_reduce"
        again = {
            title: [found[title]["calls"]["recompute", op] for op in (reduces, "all_gather")]
            for title in WAYS
        }
        passes, gathers = more.get("passes", 1), reduces == "reduce_scatter"
        assert [again[title][0] for title in WAYS] == [2 * passes, 0, 0, 0]
        if name != "mla":  # which gathers latent vectors, too
            expected = [4, 4, 2, 2] if gathers else [0] * 4
            if gathers:  # the gradient's, too, unless dropout's mask is what backward needs first
                ahead = [0, 0, 0, 2] if "hidden_dropout" in overrides else [2, 4, 2, 2]
                expected = [n + m for n, m in zip(expected, ahead, strict=True)]
            assert [again[title][1] for title in WAYS] == [passes * n for n in expected]


@pytest.mark.slow
def test_experts_are_recomputed_and_attention_is_not_reduced_again(ranks):
    ways = {"full 1": flags(FULL, 1), "full 2": flags(FULL, 2)}
    overrides = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss", **SP}
    for found in ranks(
        2, region_ranks.compared, "moe-grouped", "te", ways, overrides, setup=SETUP, timeout=240
    ):
        one, two = (found[title]["calls"] for title in ways)
        assert found["full 1"]["differ"] == found["full 2"]["differ"] == []
        assert one["recompute", "reduce_scatter"] - two["recompute", "reduce_scatter"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["hook", "norm after the sublayer", "class"])
def test_what_may_be_read_is_computed(ranks, what):
    """A layer whose closing output something else reads has the gradients of no recomputation."""
    for found in ranks(2, region_ranks.with_a_reader, what, setup=SETUP, timeout=240):
        assert found["differ"] == []
        assert found["reduced again"] == 4 - 2 * (what == "hook")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [SP, SP | DROPOUT], ids=["plain", "dropout"])
def test_with_overlapped_products(ranks, overrides):
    """CoC gathers in parts: nothing runs ahead, and nothing is gathered or reduced in addition."""
    coc = {"use_ascend_coc": True, "coc_parallel_num": 2}
    ways = {"kept": coc, "full 2": flags(FULL, 2) | coc}
    for found in ranks(
        2, region_ranks.compared, "rmsnorm-swiglu-gqa", "te", ways, overrides, {"base": coc},
        setup=SETUP, timeout=240,
    ):  # fmt: skip
        assert found["full 2"]["differ"] == []
        again = {
            op: n for (phase, op), n in found["full 2"]["calls"].items() if phase == "recompute"
        }
        assert again == {"all_gather": 2 * 4}


REFUSED = {
    "no recomputation": ({}, "has no effect without recomputation; add --recompute-granularity"),
    "another level": (FULL | {"optimize_recomp_communication_level": 3}, "0, 1, 2"),
    "core attention": (
        {"recompute_granularity": "selective"},
        "has no effect with --recompute-modules core_attn",
    ),
    "only experts": (
        MLP | {"num_experts": 4, "moe_layer_freq": 1},
        "has no effect with --recompute-modules mlp: every layer has experts",
    ),
    "several layers as one": (
        FULL | {"recompute_num_layers": 2},
        "--recompute-method uniform --recompute-num-layers 2.*give --recompute-num-layers 1",
    ),
    "no method": ({"recompute_granularity": "full", "recompute_num_layers": 1}, "uniform or block"),
    "no number": (FULL | {"recompute_num_layers": None}, "needs a number of layers"),
    "distributed": (FULL | {"distribute_saved_activations": True}, "--distribute-saved-activ"),
    "fp8": (FULL | {"fp8": "hybrid"}, "--fp8-format"),
    "fp4": (FULL | {"fp4": "e2m1"}, "--fp4-format"),
    "graphs": (FULL | {"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
    "overlapped experts": (
        FULL | {"overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm",
    ),
    "adaptive memory": (FULL | {"adaptive_recompute_device_size": 100}, "--adaptive-recompute"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        registry.resolve({"optimize_recomp_communication_level": 2} | values, "cpu")


def test_megatron_gets_what_is_left_of_the_granularity():
    feature = RecomputeCommunication(optimize_recomp_communication_level=1)
    assert feature.corrects(FULL) == {"recompute_granularity": None}
    assert feature.corrects(MLP) == {"recompute_granularity": None}
    both = MLP | {"recompute_modules": ["core_attn", "mlp"]}
    assert feature.corrects(both) == {"recompute_modules": ["core_attn"]}


BF16 = "--bf16 --tensor-model-parallel-size 2 --sequence-parallel"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
CP = "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
TRAININGS = {
    "SP, distributed optimizer": (
        f"{BF16} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--hidden-dropout 0.1 --attention-dropout 0.1",
        f"{UNIFORM} --optimize-recomp-communication-level 2",
    ),
    "local spec, overlapped reduction": (
        f"{BF16} --transformer-impl local --overlap-grad-reduce",
        f"{UNIFORM} --optimize-recomp-communication-level 2",
    ),
    "virtual pipeline": (
        VPP,
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
        "--enable-recompute-layers-per-pp-rank --optimize-recomp-communication-level 2",
    ),
    "mlp and other modules": (
        f"{BF16} --transformer-impl local",
        f"{SELECTIVE} mlp core_attn layernorm --optimize-recomp-communication-level 1",
    ),
    "norms": (BF16, f"{SELECTIVE} mlp --optimize-recomp-communication-level 1 --recompute-norm"),
    "latent attention, multi-token prediction, CP": (
        f"{CP} --mtp-num-layers 1 --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 "
        "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
        f"{UNIFORM} --optimize-recomp-communication-level 2",
    ),
    "experts": (
        f"{BF16} --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
        "--moe-token-dispatcher-type alltoall "
        "--moe-shared-expert-intermediate-size 64 --moe-layer-freq [0,1,0,1]",
        f"{UNIFORM} --optimize-recomp-communication-level 2",
    ),
    "zero 3": ("--bf16 --zero-stage 3", f"{UNIFORM} --optimize-recomp-communication-level 2"),
}  # fmt: skip


@pytest.mark.weekly_cases(
    "local spec, *",
    "mlp and *",
    "experts",
    "norms",
    "zero 3",
    "latent attention, multi-token prediction, CP",
    "virtual pipeline",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", TRAININGS)
def test_parameters_after_training_are_those_without_recomputation(ranks, case):
    layout, more = TRAININGS[case]
    plain, ours = (
        ranks(2, memory_ranks.trained, words.split(), setup=SETUP, backend=None, timeout=240)
        for words in (layout, f"{layout} {more}")
    )
    assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]
    assert all(rank["reruns"] for rank in ours)
