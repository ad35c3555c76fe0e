"""``--swap-attention``: training is the same bit for bit, copies come back, refusals."""

from __future__ import annotations

import json
import re

import pytest

from tests.memory import memory_ranks
from tests.support.lazy import needs

needs("megatron.core")

OPTIONS = {"setup": "tests.support.warm", "backend": None, "timeout": 240}
SWAP = "--swap-attention --swap-min-bytes 0"
PP, TP = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
MLA = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16"
)
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1"
)
ADAPTED = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
CASES = {
    "virtual pipeline": (2, VPP, ""),
    "pipeline, local spec": (2, f"{PP} --transformer-impl local", "--recompute-num-layers 1"),
    "sequence parallel, dropout": (
        2,
        f"--bf16 {TP} --sequence-parallel --hidden-dropout 0.1 --attention-dropout 0.1",
        "--recompute-num-layers 2",
    ),
    "latent attention, multi-token prediction, context parallel": (
        2,
        f"--context-parallel-size 2 --context-parallel-algo megatron_cp_algo --mtp-num-layers 1 "
        f"{MLA}",
        "",
    ),
    "experts": (
        2,
        f"{MOE} --expert-model-parallel-size 2",
        "--recompute-num-layers 4 --swap-modules self_attention,mlp.router",
    ),
    "packed documents, distributed optimizer": (
        2,
        "--bf16 --use-distributed-optimizer --reset-attention-mask --reset-position-ids "
        "--overlap-grad-reduce --overlap-param-gather",
        "--recompute-activation-function",
    ),
    "core attention computed again by Megatron": (1, "--recompute-granularity selective", ""),
    "norms computed again": (
        1,
        "--bf16 --eval-interval 1 --eval-iters 1",
        "--swap-modules self_attention --recompute-norm",
    ),
    "fp8": (
        1,
        "--bf16 --ffn-hidden-size 192 --fp8-format hybrid --fp8-recipe delayed "
        "--fp8-amax-history-len 4 --fp8-amax-compute-algo max",
        "",
    ),
}


QUICK = ("sequence parallel, dropout",)


@pytest.mark.weekly_cases(
    "virtual pipeline",
    "pipeline, local spec",
    "experts",
    "norms computed again",
    "packed documents, distributed optimizer",
    "latent attention, multi-token prediction, context parallel",
)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_parameters_after_training_are_those_without_swapping(ranks, case):
    ours = assert_swapped_equals_plain(ranks, *CASES[case])
    if case == "virtual pipeline":
        swap = dict.fromkeys(("input_layernorm", "pre_mlp_layernorm", "self_attention"), "offload")
        # Layers 0 and 2, and 1 and 3; the last layer of the model stays.
        assert [list(map(json.loads, rank["plans"])) for rank in ours] == [
            [{"decoder.layers.0": swap}] * 2,
            [{"decoder.layers.0": swap}, {"decoder.layers.0": {"layer": "keep"}}],
        ]


@pytest.mark.weekly
@pytest.mark.slow
def test_adapters(ranks, tmp_path):
    save = f"{TP} --save {tmp_path} --train-iters 1"
    ranks(2, memory_ranks.trained, save.split(), **OPTIONS)
    lora = f"{TP} --load {tmp_path} --lora-target-modules {ADAPTED} --lora-r 4 --lora-alpha 8"
    assert_swapped_equals_plain(ranks, 2, lora, "--recompute-num-layers 2")


def assert_swapped_equals_plain(ranks, world, layout, flags):
    """Train with and without swapping, and compare; returns what ranks say with it."""
    plain = ranks(world, memory_ranks.trained, layout.split(), **OPTIONS)
    ours = ranks(world, memory_ranks.swapped, f"{layout} {SWAP} {flags}".split(), **OPTIONS)
    for rank, reference in zip(ours, plain, strict=True):
        assert rank["digest"] == reference["digest"]
        assert rank["copied_in"] == rank["host"] > 0
        assert set(rank["live"]) == {0}
        # Three steps: host memory is allocated in the first one, unless documents change sizes.
        first = rank["copies"] / (1 if "--reset-attention-mask" in layout else 3)
        assert 0 < rank["copies_before"] <= first
        assert (rank["reruns"] > 0) == ("--recompute" in flags)
    return ours


def test_modules_that_no_layer_has_are_refused_with_the_nearest(ranks):
    flags = f"{SWAP} --swap-modules input_norm,self_atention".split()
    (said,) = ranks(1, memory_ranks.refused, flags, **OPTIONS)
    assert "--swap-modules: no layer has 'self_atention'; there are self_attention" in said


def test_too_little_host_memory_is_an_error_in_the_first_step(ranks):
    """Each rank holds copies of three of four layers, for one micro-batch."""
    flags = f"{SWAP} {TP}".split()
    for said in ranks(2, memory_ranks.refused, flags, 1e-9, **OPTIONS):
        assert re.search(r"--swap-attention: .* 3 layer calls in flight, 2 ranks on this", said)


def test_layer_calls_in_flight_are_those_of_the_schedule(ranks):
    """Two micro-batches or chunks wait on the first stage when the first backward pass begins."""
    first, second = ranks(2, memory_ranks.calls_in_flight, 8, setup=OPTIONS["setup"])
    assert (first["1F1B"], second["1F1B"]) == (2 * 3, 3)
    # Four micro-batches of the first of two chunks, which has 3 layers, and one of the second.
    assert first["interleaved"] == 4 * 3 + 2
    assert first["unknown size"] == first["interleaved"]
