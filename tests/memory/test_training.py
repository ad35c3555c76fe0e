"""Training with a plan of the activations ends with the same parameters, bit for bit."""

from __future__ import annotations

import json

import pytest

from tests.memory import memory_ranks
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
BOTH = "--recompute-norm --recompute-activation-function"
LOCAL = "--transformer-impl local"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-shared-expert-intermediate-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
)
VPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
CASES = {
    "dropout, tensor and sequence parallel": (
        2,
        "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1 "
        "--attention-dropout 0.1",
        BOTH,
    ),
    "virtual pipeline, local spec": (
        2,
        f"{LOCAL} {VPP}",
        f"{BOTH} --recompute-norm-num-layers 1 --recompute-activation-function-num-layers 1",
    ),
    "experts": (2, f"{MOE} --expert-model-parallel-size 2 {BLOCK} 1", BOTH),
    "latent attention, multi-token prediction, context parallel": (
        2,
        "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo "
        "--mtp-num-layers 1 --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 "
        "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
        BOTH,
    ),
    "packed documents, distributed optimizer": (
        2,
        "--bf16 --use-distributed-optimizer --reset-attention-mask --reset-position-ids "
        "--overlap-grad-reduce --overlap-param-gather",
        BOTH,
    ),
    "local spec, gradients reduced during backward": (
        2,
        f"{LOCAL} --bf16 --overlap-grad-reduce",
        BOTH,
    ),
    "layers of a rank": (2, f"{VPP} {BLOCK} 1", "--enable-recompute-layers-per-pp-rank"),
}


@pytest.mark.weekly_cases(
    "packed documents, *",
    "latent attention, *",
    "local spec, gradients reduced during backward",
    "layers of a rank",
    "virtual pipeline, local spec",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_parameters_after_training_are_those_without_a_plan(ranks, case):
    world, layout, flags = CASES[case]
    plain = ranks(
        world, memory_ranks.trained, layout.split(), setup=SETUP, backend=None, timeout=240
    )
    ours = ranks(
        world,
        memory_ranks.trained,
        [*layout.split(), *flags.split()],
        setup=SETUP,
        backend=None,
        timeout=240,
    )
    for rank, reference in zip(ours, plain, strict=True):
        assert rank["digest"] == reference["digest"]
        assert rank["reruns"] > 0 and reference["reruns"] == 0
        assert rank["host"] == 0
    if case == "layers of a rank":  # 4 layers; N = 1 is the first layer of the first chunk
        assert [list(map(json.loads, rank["plans"])) for rank in ours] == [
            [{"decoder.layers.0": {"layer": "recompute"}}]
        ] * 2


PLAN = """
all: {input_layernorm: recompute_output}
1,3: {layer: recompute}
2: {self_attention: offload, mlp: recompute}
"""
CP = "--context-parallel-size 2 --context-parallel-algo"
LAYOUTS = {
    "zero 3": (2, "--bf16 --zero-stage 3"),
    "zero 2": (2, "--bf16 --zero-stage 2"),
    "ulysses": (2, f"{CP} ulysses_cp_algo"),
    "ring with cached keys and values": (
        2,
        f"{CP} megatron_cp_algo --context-parallel-kv-cache-policy full "
        "--context-parallel-cache-interval 1",
    ),
    "adaptive": (2, f"{CP} adaptive_cp_algo"),
    "all-gather": (2, f"{CP} kvallgather_cp_algo"),
    "hybrid": (
        4,
        "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
    ),
    "different lengths": (2, "--pipeline-model-parallel-size 2 --variable-seq-lengths"),
    "experts of the local spec": (2, f"{MOE} {LOCAL} --expert-model-parallel-size 2"),
}


@pytest.mark.weekly_cases(
    "zero 2",
    "ulysses",
    "hybrid",
    "different lengths",
    "adaptive",
    "all-gather",
    "experts of the local spec",
    "ring with cached keys and values",
    "zero 3",
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_end_alike_with_a_plan_in_a_file(ranks, tmp_path, layout):
    world, flags = LAYOUTS[layout]
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN)

    def train(*more):
        return ranks(
            world,
            memory_ranks.trained,
            [*flags.split(), "--train-iters", "2", *more],
            setup=SETUP,
            backend=None,
            timeout=240,
        )

    plain, ours = train(), train("--activation-plan", str(file))
    assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]
    assert all(rank["reruns"] for rank in ours)


@pytest.mark.slow
def test_a_plan_in_a_file_trains_stages_and_adapters(ranks, tmp_path):
    def train(*flags):
        given = [word for text in flags for word in text.split()]
        return ranks(2, memory_ranks.trained, given, setup=SETUP, backend=None, timeout=240)

    file = tmp_path / "plan.yaml"
    file.write_text(PLAN)
    stages, plan = "--pipeline-model-parallel-size 2 --bf16", f"--activation-plan {file}"
    plain, ours = train(stages), train(stages, plan)
    assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]
    assert all(rank["reruns"] for rank in ours)
    first, second = (json.loads(rank["plans"][0]) for rank in ours)
    assert first["decoder.layers.1"]["layer"] == second["decoder.layers.1"]["layer"] == "recompute"
    assert second["decoder.layers.0"]["self_attention"] == "offload"

    train(stages, f"--train-iters 1 --save {tmp_path / 'base'}")
    adapters = (
        f"--load {tmp_path / 'base'} --lora-target-modules linear_qkv linear_fc1 linear_fc2 "
        "--lora-r 4 --lora-alpha 8 --lora-dropout 0.1"
    )
    plain, ours = train(stages, adapters), train(stages, adapters, plan)
    assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]
    assert all(rank["reruns"] for rank in ours)
