"""Training continues on the other layout: grid and one rank, optimizer states included."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs
from tests.support.trainer_job import SETUP, metrics
from tests.tensor_parallel.two_dimensional import model_ranks
from tests.training.matrix_job import train

needs("megatron.core")

# Grouped queries, gated MLP, biases and LayerNorm: every kind of parameter.
MODEL = (
    "--num-layers 2 --group-query-attention --num-query-groups 4 --normalization LayerNorm "
    "--train-iters 4 --ckpt-format torch_dist --use-distributed-optimizer "
    "--lr-warmup-iters 1 --weight-decay 0.1"
)
GRID = "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2"


@pytest.mark.slow
def test_training_continues_on_the_other_layout(rank_pool, tmp_path):
    def run(world: int, name: str, flags: str) -> list[tuple[float, float]]:
        file = tmp_path / f"{name}.jsonl"
        words = [*MODEL.split(), *flags.split(), "--metrics-file", str(file)]
        rank_pool.run(world, train, words, setup=SETUP, backend=None, timeout=240)
        return [(r["lm_loss"], r["grad_norm"]) for r in metrics(file)]

    def equal(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
        for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=2e-6)
            assert norm == pytest.approx(expected_norm, rel=1e-4)

    one = run(1, "one", f"--save {tmp_path}/one --save-interval 2")
    after_two = f"--load {tmp_path}/one --ckpt-step 2"
    grid = run(4, "grid", f"{GRID} {after_two} --save {tmp_path}/grid --save-interval 1")
    equal(grid, one[2:])
    # What the grid wrote after its first step.
    again = run(1, "again", f"--load {tmp_path}/grid --ckpt-step 3")
    equal(again, one[3:])


def test_entries_of_every_rank_make_the_tensors_of_one_rank(ranks):
    """Each element is written exactly once, at its place; gate and values apart."""
    (whole,) = ranks(1, model_ranks.checkpoint_entries, 1, 0, setup=SETUP)
    shards = ranks(4, model_ranks.checkpoint_entries, 4, 2, setup=SETUP)
    assert {key for shard in shards for key, *_ in shard} == {key for key, *_ in whole}
    filled: dict[str, torch.Tensor] = {}
    expected = {key: torch.zeros(shape) for key, shape, _, _ in whole}
    for key, shape, start, data in (entry for shard in shards for entry in shard):
        assert shape == tuple(expected[key].shape), key
        place = tuple(slice(a, a + n) for a, n in zip(start, data.shape, strict=True))
        filled.setdefault(key, torch.zeros(shape))[place] += data
    for key, _, start, data in whole:
        place = tuple(slice(a, a + n) for a, n in zip(start, data.shape, strict=True))
        expected[key][place] += data
    for key, tensor in expected.items():
        assert torch.equal(filled[key], tensor), key
