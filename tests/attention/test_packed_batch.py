"""Packed documents: cu_seqlens, positions, and every algorithm on many ranks of one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.attention.packed_batch import (
    cu_seqlens_of_length,
    cu_seqlens_of_samples,
    cu_seqlens_of_starts,
    cu_seqlens_of_tokens,
    pack,
    positions_of,
    shard,
    starts_of,
)
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError
from tests.attention.test_executor import EXACT, SCALE, run
from tests.support import truth

SIZE, EOD = 64, 0
STRATEGIES = {
    "ring": Strategy("ring"),
    "double ring": Strategy("ring", ring_window=2),
    "all-gather": Strategy("all_gather"),
    "needed only": Strategy("needed"),
    "ulysses": Strategy("ulysses"),
    "hybrid": Strategy("hybrid", ulysses_degree=2),
    "adaptive": Strategy("adaptive", granularity=4),
    "hybrid adaptive": Strategy("hybrid_adaptive", ulysses_degree=2, granularity=4),
}
LENGTHS = {
    "many lengths": [32, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1],
    "one document": [SIZE],
    "all of length 1": [1] * SIZE,
}
ENDS = {
    "end first": [0, 20],
    "end last": [30, SIZE - 1],
    "ends adjacent": [10, 11, 12, 40],
    "no end": [],
}


def with_ends(*rows: list[int]) -> torch.Tensor:
    """Tokens whose documents end at some places of each row."""
    tokens = torch.ones(len(rows), SIZE, dtype=torch.int64)
    for row, ends in zip(tokens, rows, strict=True):
        row[ends] = EOD
    return tokens


def borders_of(lengths: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


DOCUMENTS = {
    **{name: (borders_of(lengths), 1) for name, lengths in LENGTHS.items()},
    **{name: (cu_seqlens_of_tokens(with_ends(ends), EOD), 1) for name, ends in ENDS.items()},
    "two rows": (cu_seqlens_of_tokens(with_ends([5, 40], [63, 11]), EOD), 2),
}


def possible(strategy: Strategy, ranks: int) -> bool:
    """A hybrid needs two groups at least, and so does a ring of windows."""
    return ranks // max(strategy.ulysses_degree, strategy.ring_window) > 1 or (
        strategy.ulysses_degree == strategy.ring_window == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_every_algorithm_equals_the_block_diagonal_mask(name, documents):
    (boundaries, samples), strategy = DOCUMENTS[documents], STRATEGIES[name]
    *qkv, dout = truth.tensors(boundaries[-1])
    starts = torch.zeros(boundaries[-1], dtype=torch.int64)
    starts[list(boundaries[:-1])] = 1
    document = starts.cumsum(0)
    keep = (document[:, None] == document).tril()
    expected = truth.attend(*qkv, dout, keep, scale=SCALE)
    for ranks in (2, 4, 8):
        if not possible(strategy, ranks):
            continue
        batch = pack(boundaries, samples, strategy=strategy, ranks=ranks)
        plan = strategy.plan(batch.mask(), batch.sharding)
        got, _, _ = run(plan, tuple(qkv), dout)
        for mine, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=EXACT)
        # No pair of other documents is computed and no token is padding.
        area = sum(part.area() for stage in plan.forward for own in stage.work for part in own)
        assert area == sum(
            n * (n + 1) // 2 for n in (b - a for a, b in itertools.pairwise(boundaries))
        )
        owned = torch.cat([batch.rows(rank) for rank in range(ranks)])
        assert owned.sort().values.equal(torch.arange(samples * SIZE))
        assert len({len(batch.rows(rank)) for rank in range(ranks)}) == 1


def test_the_eod_token_belongs_to_its_document_and_a_sample_end_ends_one():
    tokens = torch.tensor([[1, EOD, 2, EOD, EOD, 3], [EOD, 1, 1, 1, 1, EOD]])
    boundaries = cu_seqlens_of_tokens(tokens, EOD)
    assert boundaries == (0, 2, 4, 5, 6, 7, 12)
    assert positions_of(boundaries).view(2, 6).tolist() == [[0, 1, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4]]
    assert cu_seqlens_of_starts(starts_of(boundaries, 2)) == boundaries
    assert cu_seqlens_of_samples(2, 6) == (0, 6, 12)


def test_documents_of_a_fixed_length_end_with_their_sample():
    assert cu_seqlens_of_length(2, 6, 4) == (0, 4, 6, 10, 12)
    with pytest.raises(ConfigError, match="--fix-sub-seq-length 0 must be at least 1"):
        cu_seqlens_of_length(1, 6, 0)


@pytest.mark.parametrize("name", ["ring", "adaptive"])
def test_mask_and_positions_are_reset_independently(name):
    boundaries = cu_seqlens_of_tokens(with_ends([5, 40], [63, 11]), EOD)
    rows = torch.arange(2 * SIZE).view(2, SIZE)
    for reset_mask, reset_positions in itertools.product((False, True), repeat=2):
        for rank in range(4):
            batch = pack(
                boundaries, 2, strategy=STRATEGIES[name], ranks=4, rank=rank,
                reset_mask=reset_mask, reset_positions=reset_positions,
            )  # fmt: skip
            assert batch.cu_seqlens == (boundaries if reset_mask else (0, SIZE, 2 * SIZE))
            wanted = positions_of(boundaries if reset_positions else (0, SIZE, 2 * SIZE))
            mine = shard(rows, batch, rank)
            assert mine.shape == batch.positions.shape == (2, SIZE // 4)
            assert batch.positions.equal(wanted[mine])
