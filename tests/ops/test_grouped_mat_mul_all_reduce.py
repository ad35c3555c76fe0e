"""npu_grouped_mat_mul_all_reduce against products in one process, for every split_item."""

from __future__ import annotations

import pytest
import torch

from mindspeed.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce
from tests.ops import coc_ranks

K = 8
ROWS = (3, 0, 4)


def whole(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def problem(p, split_item, bias):
    """Arguments of each rank and the results; one n for one output."""
    widths = (5, 5, 5) if split_item in (2, 3) else (5, 2, 1)
    x = [whole(m, K, seed=i) for i, m in enumerate(ROWS)]
    w = [whole(K, n, seed=10 + i) for i, n in enumerate(widths)]
    b = [whole(n, seed=20 + i) for i, n in enumerate(widths)] if bias else None
    results = [
        a @ c + (0 if b is None else b[i]) for i, (a, c) in enumerate(zip(x, w, strict=True))
    ]
    one_x = split_item in (1, 3)
    arguments = []
    for rank in range(p):
        parts = [a.chunk(p, 1)[rank].contiguous() for a in x]
        arguments.append(
            {
                "x": [torch.cat(parts)] if one_x else parts,
                "weight": [c.chunk(p)[rank] for c in w],
                "bias": b if rank == 0 or b is None else [torch.zeros_like(one) for one in b],
                "group_list": [3, 3, 7] if one_x else None,
                "split_item": split_item,
            }
        )
    return arguments, [torch.cat(results)] if split_item in (2, 3) else results


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("split_item", [0, 1, 2, 3])
def test_equals_one_process_with_one_collective(ranks, p, split_item):
    arguments, expected = problem(p, split_item, bias=p == 2)
    size = sum(x.numel() for x in expected) * 4
    for results, sent in ranks(p, coc_ranks.grouped, arguments):
        assert len(results) == len(expected)
        assert all(map(torch.equal, results, expected))
        assert sent == [("all_reduce", size)]


GOOD = {"x": [torch.ones(2, 3)] * 2, "weight": [torch.ones(3, 4)] * 2, "hcomm": "0"}
ONE = {"x": [torch.ones(4, 3)], "split_item": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split_item": 4}, "split_item: expected one of 0, 1, 2, 3, got 4"),
        ({"reduce_op": "avg"}, "reduce_op: expected one of 'sum', got 'avg'"),
        ({"comm_turn": 2}, "comm_turn: expected one of 0, got 2"),
        ({"x": [torch.ones(2, 3)]}, "x: expected 2 tensors, one per weight, got 1"),
        ({"weight": []}, "weight: expected 1 to 64 tensors, got 0"),
        ({"weight": [torch.ones(3, 4)] * 65}, "weight: expected 1 to 64 tensors, got 65"),
        ({"bias": [torch.ones(4)]}, "bias: expected 2 tensors, one per weight, got 1"),
        ({"bias": [torch.ones(4), torch.ones(5)]}, r"bias\[1\]: expected shape \(4,\)"),
        ({"weight": [torch.ones(3, 4), torch.ones(2, 4)]}, r"weight\[1\]: expected 3 rows"),
        (
            {"weight": [torch.ones(3, 4), torch.ones(3, 5)], "split_item": 2},
            "weight: expected one n",
        ),
        ({"group_list": [2, 4]}, "group_list: expected None with split_item 0"),
        ({**ONE}, "group_list: expected 2 row numbers"),
        ({**ONE, "group_list": [4]}, "group_list: expected 2 row numbers"),
        ({**ONE, "group_list": [3, 2]}, "group_list: expected numbers that do not decrease"),
        ({**ONE, "group_list": [3, 5]}, "group_list: expected 4 rows in all"),
        ({**ONE, "x": [torch.ones(4, 3)] * 2, "group_list": [2, 4]}, "x: expected 1 tensor"),
        (
            {"x": [torch.ones(2, 3, requires_grad=True)] * 2},
            r"has no gradient, but x\[0\] requires",
        ),
        ({"hcomm": None}, "hcomm: expected a process group"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=f"npu_grouped_mat_mul_all_reduce.*{message}"):
        npu_grouped_mat_mul_all_reduce(**{**GOOD, **change})
