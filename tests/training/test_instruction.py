"""Conversations train alike in every layout, padded to any length or packed.

Losses and gradient norms of the first steps, fp32, relative 1e-6 and 1e-4: the batch is the same
set of samples, whatever ranks, lengths and rows it is spread over.
"""

from __future__ import annotations

import pytest
from instruction_job import flags_for, write_conversations
from trainer_job import SETUP, metrics, train

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
ENGINE = "--transformer-impl transformer_engine"
VARIABLE = "--variable-seq-lengths"


@pytest.fixture(scope="module")
def prefix(rank_pool, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("chats") / "chats")
    rank_pool.run(1, write_conversations, path, setup=SETUP, backend=None, timeout=60)
    return path


@pytest.fixture(scope="module")
def run(rank_pool, prefix, tmp_path_factory):
    """Trains three steps on some ranks from one set of weights; returns the metrics."""
    folder = tmp_path_factory.mktemp("runs")
    weights = str(folder / "weights")
    start = flags_for(prefix, "--train-iters 1 --lr 0 --save", weights)
    (result,) = rank_pool.run(1, train, start, setup=SETUP, backend=None, timeout=60)
    assert result["error"] is None, result

    def go(world: int, *flags: str) -> list[dict]:
        file = folder / "metrics.jsonl"
        file.unlink(missing_ok=True)
        load = f"--load {weights} --finetune --no-load-optim --no-load-rng --train-iters 3"
        command = flags_for(prefix, load, f"--metrics-file {file}", *flags)
        results = rank_pool.run(world, train, command, setup=SETUP, backend=None, timeout=120)
        assert {result["error"] for result in results} == {None}, results
        return metrics(file)

    return go


def same(ours: list[dict], theirs: list[dict]) -> None:
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def one_rank(run) -> list[dict]:
    return run(1)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, VARIABLE),
        (2, VARIABLE),
        (2, f"{TP} --sequence-parallel {VARIABLE} --pad-to-multiple-of 3"),
        (2, f"{PP} {VARIABLE}"),
        (2, f"{PP} --num-layers-per-virtual-pipeline-stage 1 {VARIABLE}"),
        (2, f"{PP} {ENGINE}"),
        (4, f"{TP} {PP} {VARIABLE} {ENGINE}"),
    ],
    ids=str,
)
def test_every_layout_and_length_gives_the_losses_of_one_rank(run, one_rank, world, flags):
    same(run(world, flags), one_rank)
