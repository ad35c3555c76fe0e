"""Shards of parameters by rank, against hand-written ones."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.errors import ConfigError
from mindspeed.models.parallel_sizes import ParallelSizes, shard, shard_shape, unshard
from mindspeed.models.table import Parameter


def parameter(split, shape=(8, 6)):
    return Parameter("a.weight", 0, None, None, shape, (), split, False, False)


PARTS = {
    "rows": ["0 1 2 3", "4 5 6 7"],
    "halves": ["0 1 4 5", "2 3 6 7"],  # gate and up projection, each cut
    "rows_if_local": ["0 1 2 3", "4 5 6 7"],
}


@pytest.mark.parametrize("split", [*PARTS, "columns", None])
def test_shards_equal_those_of_tensor_parallel_ranks_and_join_to_the_full_tensor(split):
    whole, one = torch.arange(48.0).view(8, 6), parameter(split)
    parts = list(shard(whole, one, "local", 2))
    if split in PARTS:
        rows = [[int(word) for word in words.split()] for words in PARTS[split]]
        assert all(torch.equal(part, whole[r]) for part, r in zip(parts, rows, strict=True))
    elif split == "columns":
        assert torch.equal(parts[0], whole[:, :3]) and torch.equal(parts[1], whole[:, 3:])
    else:
        assert all(torch.equal(part, whole) for part in parts)
    assert {shard_shape(one, "local", 2)} == {tuple(part.shape) for part in parts}
    assert torch.equal(unshard(parts, one, "local"), whole)


def test_tensors_that_only_the_local_spec_shards_are_replicated_elsewhere():
    one = parameter("rows_if_local")
    assert shard_shape(one, "transformer_engine", 2) == (8, 6) and shard_shape(one, "local", 2) == (
        4,
        6,
    )


def test_pipeline_stages_are_contiguous_layers():
    assert ParallelSizes(pipeline=2).stages(6) == [range(0, 3), range(3, 6)]
    assert ParallelSizes(pipeline=2, virtual=2).stages(8) == [range(n, n + 2) for n in (0, 2, 4, 6)]
    assert ParallelSizes(pipeline=3, layers=(1, 4, 1)).stages(6) == [
        range(1),
        range(1, 5),
        range(5, 6),
    ]
    with pytest.raises(ConfigError, match="7 layers cannot be divided into 2 equal"):
        ParallelSizes(pipeline=2).stages(7)
    for layers in ((1, 5), (2, 2, 1)):
        with pytest.raises(ConfigError, match="3 numbers with the sum 6 are needed"):
            ParallelSizes(pipeline=3, layers=layers).stages(6)
