"""The trainer with ``--use-nanopipe``: the same losses and the same weights, with dropout."""

from __future__ import annotations

import pytest

from tests.support.lazy import needs
from tests.support.trainer_job import SETUP, metrics, train

needs("megatron.core")

pytestmark = pytest.mark.slow

JOB = (
    "--pipeline-model-parallel-size 2 --micro-batch-size 1 --train-iters 3 --hidden-dropout 0.1 "
    "--attention-dropout 0.1"
)
TE, CHUNKS = "--transformer-impl transformer_engine", "--num-layers-per-virtual-pipeline-stage 1"
CASES = {
    "packed documents": f"{TE} {CHUNKS} --reset-attention-mask --reset-position-ids",
    "variable lengths": f"{TE} --variable-seq-lengths",
    "LoRA": f"{CHUNKS} --lora-r 4 --lora-target-modules linear_qkv linear_fc1 linear_fc2",
    # Half of the layers: where all are computed again, no backward is divided.
    "recompute": f"{TE} --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1",
    "activations on the host": f"{TE} {CHUNKS} --swap-attention --swap-min-bytes 0",
    "fp8": f"{TE} {CHUNKS} --bf16 --fp8-format hybrid",
}


@pytest.fixture(scope="module")
def weights(rank_pool, tmp_path_factory):
    """A checkpoint that adapters can be trained on."""
    folder = tmp_path_factory.mktemp("weights")
    run(rank_pool, 1, f"--train-iters 1 --lr 0 --save {folder}")
    return folder


def run(pool, world, flags):
    results = pool.run(world, train, flags.split(), setup=SETUP, backend=None, timeout=240)
    assert {result["error"] for result in results} == {None}
    return [result["digest"] for result in results]


@pytest.mark.weekly_cases(
    "recompute", "activations on the host", "variable lengths", "packed documents", "LoRA"
)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_megatrons_schedule(rank_pool, tmp_path, weights, case):
    found, plan = [], tmp_path / "plan.csv"
    load = f"--load {weights} --finetune --no-load-optim --no-load-rng" if case == "LoRA" else ""
    for flags in ("", f"--use-nanopipe --pipeline-schedule-dump {plan}"):
        file = tmp_path / f"{len(found)}.jsonl"
        digests = run(rank_pool, 2, f"{JOB} {CASES[case]} {load} {flags} --metrics-file {file}")
        found.append(([(step["lm_loss"], step["grad_norm"]) for step in metrics(file)], digests))
    assert len(found[0][0]) == 3
    assert found[0] == found[1]
    assert plan.read_text().count("W") == plan.read_text().count("I") > 0


@pytest.mark.weekly
def test_with_swap_only_the_rounding_of_sums_differs(rank_pool, tmp_path):
    found, plan = [], tmp_path / "plan.csv"
    for flags in ("", f"--use-nanopipe --use-nanopipe-swap --pipeline-schedule-dump {plan}"):
        file = tmp_path / f"{len(found)}.jsonl"
        run(rank_pool, 2, f"{JOB} {TE} {CHUNKS} {flags} --metrics-file {file}")
        found.append([(step["lm_loss"], step["grad_norm"]) for step in metrics(file)])
    moved = [row.count("O") for row in plan.read_text().splitlines()]
    assert moved == [0, 2]
    assert len(found[0]) == 3
    for before, swapped in zip(*found, strict=True):
        assert swapped == pytest.approx(before, rel=1e-5)
