"""Sequences are truncated after the last trained token: same losses, fewer tokens, no messages."""

from __future__ import annotations

import pytest

from tests.support.documents_job import train_and_count, write_padded_rows
from tests.support.trainer_job import SETUP, metrics

COMMON = "--eod-mask-loss --calculate-per-token-loss --no-mock-data --split 1,0,0"
PP = "--pipeline-model-parallel-size 2"
MICRO_BATCHES = 4  # of a step: 8 rows, two at a time


@pytest.fixture(scope="module")
def run(rank_pool, tmp_path_factory):
    """Trains two steps from one set of weights; returns the metrics, and what each rank did."""
    folder = tmp_path_factory.mktemp("rows")
    prefix, weights = str(folder / "rows"), str(folder / "weights")
    rank_pool.run(1, write_padded_rows, prefix, setup=SETUP, backend=None, timeout=120)

    def go(world: int, *flags: str):
        file = folder / "metrics.jsonl"
        file.unlink(missing_ok=True)
        command = f"{COMMON} --data-path {prefix} --metrics-file {file} {' '.join(flags)}".split()
        results = rank_pool.run(
            world, train_and_count, command, setup=SETUP, backend=None, timeout=240
        )
        assert {result["error"] for result in results} == {None}, results
        return metrics(file), results

    go(1, f"--train-iters 1 --lr 0 --save {weights}")
    load = f"--load {weights} --finetune --no-load-optim --no-load-rng --train-iters 2"
    return lambda world, *flags: go(world, load, *flags)


@pytest.fixture(scope="module")
def whole(run):
    records, (rank,) = run(1)
    assert set(rank["lengths"]) == {64}
    return records


@pytest.mark.weekly_cases("2---pipeline-model-parallel-size 2 --num-layers-per-virtual*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags", "boundaries", "multiple"),
    [
        (2, f"{PP} --num-layers-per-virtual-pipeline-stage 1", 3, 1),
        (2, "--context-parallel-size 2 --pad-to-multiple-of 1", 0, 4),
        (
            4,
            f"{PP} --tensor-model-parallel-size 2 --sequence-parallel --reset-attention-mask "
            "--transformer-impl transformer_engine --pad-to-multiple-of 1",
            1,
            2,
        ),
    ],
    ids=str,
)
def test_losses_equal_those_of_full_length_sequences(
    run, whole, world, flags, boundaries, multiple
):
    ours, results = run(world, "--variable-seq-lengths", flags)
    assert len(ours) == len(whole) == 2
    for mine, other in zip(ours, whole, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    lengths = results[0]["lengths"]
    assert len(set(lengths)) > 1 and max(lengths) < 64
    assert all(length % multiple == 0 for length in lengths)
    groups = 2 if "tensor" in flags else 1
    sent = sum(result["sent"] for result in results)
    assert sent == 2 * boundaries * groups * MICRO_BATCHES * len(ours)


@pytest.mark.weekly_cases("4---pipeline-model-parallel-size 2 --tensor*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{PP} --optimize-send-recv-comm"),
        (2, f"{PP} --optimized-pipeline --manual-mbs 1,2,3,2"),
        (4, f"{PP} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-schedule zb-h1"),
        (2, f"{PP} --num-layers-per-virtual-pipeline-stage 1 --optimize-vpp-send-recv-comm"),
        (2, f"{PP} --pipeline-schedule zb-v"),
    ],
    ids=str,
)
def test_plans_know_the_lengths_that_are_read_ahead(run, whole, world, flags):
    te = "--transformer-impl transformer_engine"
    ours, results = run(world, "--variable-seq-lengths --pad-to-multiple-of 1", te, flags)
    for mine, other in zip(ours, whole, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert len(set(results[0]["lengths"])) > 1
    assert not any(result["headers"] for result in results)
