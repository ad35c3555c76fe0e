"""A small GPT of Megatron trains on npu tensors and gives the numbers of the CPU."""

from __future__ import annotations

import pytest

from npu_emulator import training_jobs as jobs

pytest.importorskip("megatron.core", reason="needs megatron-core")

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one-rank": (1, ""),
    "tensor-parallel": (2, TP),
    "sequence-parallel-bf16": (2, f"{TP} --sequence-parallel --use-distributed-optimizer --bf16"),
    "pipeline": (2, PP),
    "experts": (
        2,
        "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_the_cpu(rank_pool, npu_pool, tmp_path, layout):
    world_size, flags = LAYOUTS[layout]
    options = {"backend": None, "timeout": 400}
    cpu, npu = tmp_path / "cpu.jsonl", tmp_path / "npu.jsonl"
    setup = "npu_emulator.preload_trainer"
    results = npu_pool.run(world_size, jobs.train, str(npu), flags.split(), setup=setup, **options)
    assert results == [{"backend": "hccl", "iteration": 4, "devices": ["npu"]}] * world_size
    rank_pool.run(
        world_size, jobs.train, str(cpu), flags.split(), setup="mindspeed.megatron_adaptor", **options
    )  # fmt: skip
    expected = jobs.records(cpu)
    assert len(expected) == 4
    for got, wanted in zip(jobs.records(npu), expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
