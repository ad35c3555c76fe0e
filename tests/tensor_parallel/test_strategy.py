"""Which strategy a product gets: a table of configurations and shapes."""

from __future__ import annotations

import pytest

from mindspeed.tensor_parallel.strategy import (
    Overlap,
    Product,
    ProductStrategy,
    choose,
    valid_parts,
)

SHAPE = (16384, 5120, 1920)
SCATTER = Product("matmul_scatter", *SHAPE, 8)
GATHER = Product("gather_matmul", *SHAPE, 8)
REDUCE = Product("matmul_reduce", *SHAPE, 8)
ODD = Product("matmul_scatter", 8 * 6, 5120, 1920, 8)  # 6 rows a rank
LEFT = "6 rows cannot be divided into {} parts"
NONE = "there are no fused kernels for tensors on cpu"

CASES = {
    "off": (Overlap(), SCATTER, None, ProductStrategy("plain")),
    "parts": (Overlap(parts=4), SCATTER, NONE, ProductStrategy("chunked", 4)),
    "fused": (Overlap(parts=2, fused=True), GATHER, None, ProductStrategy("fused")),
    "fused on the cpu": (Overlap(fused=True), GATHER, NONE, ProductStrategy("chunked", 4, NONE)),
    "with a number": (
        Overlap(parts=8, fused=True),
        GATHER,
        NONE,
        ProductStrategy("chunked", 8, NONE),
    ),
    "fused, odd": (Overlap(fused=True), ODD, NONE, ProductStrategy("chunked", 3, NONE)),
    "odd": (Overlap(parts=4), ODD, None, ProductStrategy("chunked", 3, LEFT.format(4))),
    "prime": (
        Overlap(parts=4),
        Product("matmul_reduce", 7, 3, 5, 2),
        None,
        ProductStrategy("plain", 1, "7 rows cannot be divided into 4 parts"),
    ),
    "empty": (
        Overlap(parts=2),
        Product("matmul_reduce", 0, 3, 5, 2),
        None,
        ProductStrategy("plain", 1, "0 rows cannot be divided into 2 parts"),
    ),
    "this shape more": (
        Overlap(parts=2, parts_of={SHAPE: 8}),
        SCATTER,
        None,
        ProductStrategy("chunked", 8),
    ),
    "this shape not": (
        Overlap(parts=2, parts_of={SHAPE: 1}),
        SCATTER,
        None,
        ProductStrategy("plain"),
    ),
    "another shape": (
        Overlap(parts=2, parts_of={(1, 2, 3): 8}),
        SCATTER,
        None,
        ProductStrategy("chunked", 2),
    ),
    "this shape not fused": (
        Overlap(fused=True, parts_of={SHAPE: 2}),
        SCATTER,
        None,
        ProductStrategy("chunked", 2),
    ),
    "not this operation": (
        Overlap(parts=2, operations=("gather_matmul",)),
        REDUCE,
        None,
        ProductStrategy("plain"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_strategy(case):
    overlap, product, unfit, expected = CASES[case]
    assert choose(overlap, product, unfit) == expected


def test_parts_that_a_user_can_choose():
    assert valid_parts(12) == (1, 2, 4)
    assert valid_parts(7) == (1,)
    assert SCATTER.rows == GATHER.rows == 2048 and REDUCE.rows == 16384
