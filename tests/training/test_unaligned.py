"""Checkpoints of models that tensor-parallel ranks share unevenly."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP, metrics
from tests.training.matrix_job import train

MODEL = (
    "--num-attention-heads 10 --num-query-groups 5 --kv-channels 8 --ffn-hidden-size 171 "
    "--seq-length 63 --untie-embeddings-and-output-weights --use-distributed-optimizer "
    "--make-vocab-size-divisible-by 256"
)
# Megatron's sharding formats of the distributed optimizer: only the second reshards.
RESHARDED = "--dist-ckpt-optim-fully-reshardable"
TWO = "--tensor-model-parallel-size 2 --sequence-parallel --unaligned-linear"
FOUR = "--tensor-model-parallel-size 4 --sequence-parallel --unaligned-linear"
RESUMES = {
    "one rank to two": (1, "", 2, TWO),
    "two ranks to one": (2, TWO, 1, ""),
    "four ranks to two, other layers": (4, FOUR, 2, f"{TWO} --transformer-impl local"),
}


def run(ranks, size, directory, *flags):
    file = directory / "metrics.jsonl"
    file.unlink(missing_ok=True)
    command = [*MODEL.split(), *" ".join(flags).split(), "--metrics-file", str(file)]
    ranks(size, train, command, setup=SETUP, backend=None, timeout=240)
    return [(record["lm_loss"], record["grad_norm"]) for record in metrics(file)]


@pytest.fixture(scope="module")
def uninterrupted(rank_pool, tmp_path_factory):
    return run(rank_pool.run, 1, tmp_path_factory.mktemp("whole"), "--use-cpu-initialization")


@pytest.mark.weekly_cases("two ranks to one", "one rank to two")
@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMES)
def test_a_resumed_run_continues_like_one_rank(case, ranks, uninterrupted, tmp_path):
    """Also the first steps are equal: initial weights are shards of those of one rank."""
    first_size, first, second_size, second = RESUMES[case]
    where = str(tmp_path / "saved")
    begin = f"{first} --use-cpu-initialization --save {where} --save-interval 2 --exit-interval 2"
    found = run(ranks, first_size, tmp_path, begin, RESHARDED)
    found += run(ranks, second_size, tmp_path, f"{second} --load {where}", RESHARDED)
    assert len(found) == len(uninterrupted) == 3
    for (loss, norm), (expected_loss, expected_norm) in zip(found, uninterrupted, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
