"""A small GPT of Megatron trains on npu tensors and gives the numbers of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_emulator import training_jobs as jobs

pytest.importorskip("megatron.core", reason="needs megatron-core")

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
# Ranks, model, how it is laid out, relative tolerance of losses and gradient norms.
LAYOUTS = {
    "one-rank": (1, "", "", 1e-5),
    "tensor-parallel": (2, "", TP, 1e-5),
    "sequence-parallel-bf16": (
        2,
        "",
        f"{TP} --sequence-parallel --use-distributed-optimizer --bf16",
        1e-2,
    ),
    "pipeline": (2, "", PP, 1e-5),
    "experts": (2, MOE, "--expert-model-parallel-size 2", 1e-5),
}
CPU_SETUP, NPU_SETUP = "mindspeed.megatron_adaptor", "npu_emulator.preload_trainer"
OPTIONS = {"backend": None, "timeout": 400}


@pytest.fixture(scope="module")
def weights(rank_pool, tmp_path_factory):
    """``weights(model)``: initial weights saved on the CPU by one rank, once for each model."""
    made: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("weights")
            flags = [*model.split(), "--save", str(made[model]), "--lr", "0", "--train-iters", "1"]
            rank_pool.run(1, jobs.train, flags, setup=CPU_SETUP, **OPTIONS)
        return made[model]

    return get


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_the_cpu(rank_pool, npu_pool, weights, tmp_path, layout):
    world_size, model, flags, tolerance = LAYOUTS[layout]
    load = ["--load", str(weights(model)), "--finetune", "--no-load-optim", "--no-load-rng"]
    command = [*model.split(), *load, *flags.split(), "--metrics-file"]
    npu, cpu = tmp_path / "npu.jsonl", tmp_path / "cpu.jsonl"
    results = npu_pool.run(world_size, jobs.train, [*command, str(npu)], setup=NPU_SETUP, **OPTIONS)
    assert results == [{"backend": "hccl", "iteration": 4, "devices": ["npu"]}] * world_size
    rank_pool.run(world_size, jobs.train, [*command, str(cpu)], setup=CPU_SETUP, **OPTIONS)
    expected = jobs.records(cpu)
    assert len(expected) == 4
    assert expected[0][0] > expected[-1][0]
    for got, wanted in zip(jobs.records(npu), expected, strict=True):
        assert got == pytest.approx(wanted, rel=tolerance)
