"""A small GPT of Megatron trains on npu tensors and gives the numbers of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.npu_emulator import training_jobs as jobs
from tests.npu_emulator import wheel
from tests.support.lazy import needs

needs("megatron.core")

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
PLAIN = (
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm"
)
FUSED = "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-flash-attn"
PERMUTE = "--use-fused-moe-token-permute-and-unpermute"
HIDDEN = "--moe-alltoall-overlap-comm"
CP = "--context-parallel-size 2 --context-parallel-algo"
SWAPPED = "--swap-attention --swap-min-bytes 0"  # the NPU alone: copies to pinned memory and back
DOCUMENTS = "--fix-sub-seq-length 7 --reset-attention-mask --calculate-per-token-loss"
ATTENTION_CALLS = frozenset({"npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"})
DENSE_CALLS = ATTENTION_CALLS | {
    *("npu::npu_rms_norm", "npu::npu_rms_norm_backward"),
    *("npu::npu_swiglu", "npu::npu_swiglu_backward"),
    *("npu::npu_rotary_mul", "npu::npu_rotary_mul_backward"),
}
EXPERT_CALLS = {
    *("npu::npu_grouped_matmul", "npu::npu_moe_token_permute"),
    "npu::npu_moe_token_permute_grad_v2",
}


class Layout(NamedTuple):
    """How the NPU trains; the CPU trains the same layout without fused operators."""

    ranks: int = 1
    model: str = ""
    flags: str = ""
    fused: str = PLAIN
    calls: frozenset[str] = frozenset()  # operators of torch_npu that must have run
    tolerance: float = 1e-5  # relative, of losses, gradient norms and each gradient


LAYOUTS = {
    "one-rank": Layout(),
    "tensor-parallel": Layout(2, flags=TP),
    "sequence-parallel-bf16": Layout(
        2, flags=f"{TP} --sequence-parallel --use-distributed-optimizer --bf16", tolerance=2e-2
    ),
    "pipeline": Layout(2, flags=PP),
    "experts": Layout(2, MOE, "--expert-model-parallel-size 2"),
    "fused": Layout(fused=FUSED, calls=DENSE_CALLS),
    "fused-tensor-parallel": Layout(
        2, flags=f"{TP} --sequence-parallel", fused=FUSED, calls=DENSE_CALLS
    ),
    "fused-bf16": Layout(
        flags="--bf16",
        fused=FUSED,
        calls=DENSE_CALLS | {"atb::_npu_matmul_add_fp32"},
        tolerance=2e-2,
    ),
    "fused-experts": Layout(
        2,
        MOE,
        "--expert-model-parallel-size 2",
        fused=f"{FUSED} {PERMUTE}",
        calls=DENSE_CALLS | EXPERT_CALLS,
    ),
    "hidden-experts": Layout(
        2,
        f"{MOE} --moe-shared-expert-intermediate-size 32",
        f"--expert-model-parallel-size 2 {HIDDEN}",
        fused=f"{FUSED} {PERMUTE}",
        calls=DENSE_CALLS | EXPERT_CALLS,
    ),
    "hidden-expert-tensor": Layout(2, MOE, f"{TP} --sequence-parallel {HIDDEN}"),
    "ring": Layout(2, flags=f"{CP} megatron_cp_algo", calls=ATTENTION_CALLS),
    "ulysses-fused": Layout(2, flags=f"{CP} ulysses_cp_algo", fused=FUSED, calls=ATTENTION_CALLS),
    "swapped": Layout(fused=f"{FUSED} {SWAPPED}", calls=DENSE_CALLS),
    "adaptive-documents": Layout(
        2, flags=f"{CP} adaptive_cp_algo {DOCUMENTS}", calls=ATTENTION_CALLS
    ),
}
LOAD = ["--finetune", "--no-load-optim", "--no-load-rng", "--load"]
CPU_SETUP, NPU_SETUP = "tests.support.warm", "tests.npu_emulator.preload_trainer"
OPTIONS = {"backend": None, "timeout": 400}


@pytest.fixture(scope="module")
def weights(rank_pool, tmp_path_factory):
    """``weights(model)``: initial weights saved on the CPU by one rank, once for each model."""
    made: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("weights")
            flags = [
                *model.split(),
                *PLAIN.split(),
                "--save",
                str(made[model]),
                "--lr",
                "0",
                "--train-iters",
                "1",
            ]
            rank_pool.run(1, jobs.train, flags, setup=CPU_SETUP, **OPTIONS)
        return made[model]

    return get


@pytest.fixture(scope="module")
def on_the_cpu(rank_pool, weights, tmp_path_factory):
    """``on_the_cpu(ranks, model, flags)``: records and gradients of plain operators, kept."""
    made: dict[tuple[int, str, str], tuple[list[tuple[float, float]], list[Any]]] = {}

    def get(ranks: int, model: str, flags: str) -> tuple[list[tuple[float, float]], list[Any]]:
        if (ranks, model, flags) not in made:
            file = tmp_path_factory.mktemp("cpu") / "metrics.jsonl"
            words = [*model.split(), *LOAD, str(weights(model)), *flags.split(), *PLAIN.split()]
            words += ["--metrics-file", str(file)]
            results = rank_pool.run(ranks, jobs.train, words, setup=CPU_SETUP, **OPTIONS)
            gradients = [result["gradients"] for result in results]
            made[ranks, model, flags] = jobs.records(file), gradients
        return made[ranks, model, flags]

    return get


@pytest.mark.weekly_cases(
    *("one-rank", "tensor-parallel", "hidden-experts", "fused", "fused-tensor-parallel"),
    "fused-experts",
    "experts",
    "fused-bf16",
    "ulysses-fused",
    "swapped",
    "adaptive-documents",
    "ring",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_the_cpu(npu_pool, weights, on_the_cpu, tmp_path, layout):
    ranks, model, flags, fused, calls, tolerance = LAYOUTS[layout]
    npu = tmp_path / "npu.jsonl"
    command = [*model.split(), *LOAD, str(weights(model)), *flags.split(), *fused.split()]
    command += ["--metrics-file", str(npu)]
    results = npu_pool.run(ranks, jobs.train, command, setup=NPU_SETUP, **OPTIONS)
    expected, on_cpu = on_the_cpu(ranks, model, flags)
    for result, wanted_gradients in zip(results, on_cpu, strict=True):
        assert calls - wheel.lacking() <= result.pop("calls").keys()
        gradients = result.pop("gradients")
        assert result == {"backend": "hccl", "iteration": 3, "devices": ["npu"]}
        far = {
            name: distance
            for name, wanted in wanted_gradients.items()
            if (distance := float((gradients[name] - wanted).norm())) > tolerance * wanted.norm()
        }
        assert not far
        assert gradients.keys() == wanted_gradients.keys()
    assert len(expected) == 3
    assert expected[0][0] > expected[-1][0]
    for got, wanted in zip(jobs.records(npu), expected, strict=True):
        assert got == pytest.approx(wanted, rel=tolerance)
