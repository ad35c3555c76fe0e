"""A checkpoint is read by an optimizer of another structure: the losses are those of one run.

Each row saves in the middle of a run, and another run resumes from it with other parallel sizes
or another optimizer. The truth is the first run's second half: its layout differs, its sums do not.
Megatron-LM's own chains are in ``tests/megatron_lm/test_checkpoint_chains.py``.
"""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP, metrics, train

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --transformer-impl transformer_engine"
)
MIXED = f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 32"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
BF16 = "--bf16"

# name: (model, flags of the run that saves, flags of the one that continues)
CHAINS = {
    "experts 2 to tensor 2": (EXPERTS, EP2, TP2),
    "experts 1 to experts 2": (EXPERTS, "", EP2),
    "reshardable to plain": ("", RESHARDABLE, TP2),
    "reshardable experts 2 to tensor 2": (EXPERTS, f"{EP2} {RESHARDABLE}", f"{TP2} {RESHARDABLE}"),
    "reshardable tensor 2 to experts 2": (EXPERTS, f"{TP2} {RESHARDABLE}", f"{EP2} {RESHARDABLE}"),
    "reshardable experts 2 to plain pipeline 2": (MIXED, f"{EP2} {RESHARDABLE}", PP2),
    "experts 2 to pipeline 2": (MIXED, EP2, PP2),
    "bf16 experts 2 to tensor 2": (EXPERTS, f"{BF16} {EP2}", f"{BF16} {TP2}"),
    "bf16 tensor 2 to experts 2": (EXPERTS, f"{BF16} {TP2}", f"{BF16} {EP2}"),
}


@pytest.mark.weekly_cases(
    "reshardable to plain",
    "reshardable experts 2 to tensor 2",
    "experts 1 to experts 2",
    "bf16 experts 2 to tensor 2",
    "experts 2 to pipeline 2",
    "bf16 tensor 2 to experts 2",
    "reshardable tensor 2 to experts 2",
    "experts 2 to tensor 2",
)
@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_losses_continue_those_of_one_run(chain, ranks, tmp_path):
    model, saving, loading = CHAINS[chain]
    common = f"{model} --train-iters 4 --global-batch-size 4".split()
    whole = _run(
        ranks, tmp_path / "whole", [*common, *saving.split(), "--save", tmp_path / "c", *EVERY_2]
    )
    (tmp_path / "c/latest_checkpointed_iteration.txt").write_text("2")
    rest = _run(ranks, tmp_path / "rest", [*common, *loading.split(), "--load", tmp_path / "c"])
    assert [record["iteration"] for record in rest] == [3, 4]
    for name in ("lm_loss", "grad_norm", "learning_rate"):
        exact = [record[name] for record in whole[2:]]
        tolerance = 5e-3 if BF16 in saving else 2e-5
        assert [record[name] for record in rest] == pytest.approx(exact, rel=tolerance)


EVERY_2 = ["--save-interval", "2"]


def _run(ranks, file, flags):
    flags = [*map(str, flags), "--metrics-file", str(file)]
    results = ranks(2, train, flags, setup=SETUP, backend=None, timeout=240)
    assert {result["error"] for result in results} == {None}, results[0]["error"]
    return metrics(file)


@pytest.mark.slow
def test_sixteen_bit_states_of_a_distributed_optimizer_are_refused_by_another(ranks, tmp_path):
    save = f"{BF16} {RESHARDABLE} --save {tmp_path / 'c'} --train-iters 1".split()
    _run(ranks, tmp_path / "metrics", save)
    load = f"{BF16} --load {tmp_path / 'c'} --train-iters 2".split()
    for result in ranks(2, train, load, setup=SETUP, backend=None, timeout=240):
        assert "cannot be loaded into this one; continue with --use-dist" in result["error"]
