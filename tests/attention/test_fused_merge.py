"""Partial outputs merged by one operator are those merged by torch's."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.attention import Mask, SequenceSharding, executor, planners, zigzag
from mindspeed.attention.communication import run_in_one_process
from mindspeed.attention.kernels import SoftmaxOptions
from mindspeed.attention.plan import Plan
from tests.support import truth

SCALE = 0.3


class _Merges(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "mindspeed::ring_attention_update"
        return func(*args, **(kwargs or {}))


def attend(plan: Plan, dtype: torch.dtype, fused: bool):
    """Output and log-sum-exp in the order of positions, and merges by the operator."""
    qkv = [x.to(dtype) for x in truth.tensors(plan.mask.size)[:3]]
    rows = [plan.sharding.positions(rank) for rank in range(plan.ranks)]
    softmax = SoftmaxOptions(SCALE, fused_merge=fused)
    with _Merges() as merges:
        results = run_in_one_process(
            [
                executor.forward(plan, rank, *(x[rows[rank]] for x in qkv), softmax=softmax)
                for rank in range(plan.ranks)
            ]
        )
    back = torch.cat(rows).argsort()
    out, lse = (torch.cat([result[n] for result in results])[back] for n in range(2))
    return out, lse, merges.count


MASK = Mask(48, Mask.documents((0, 5, 29, 40)).regions)  # the last eight rows see nothing
PLANS = {
    "ring": planners.ring(MASK, zigzag(48, 4)),
    "mesh": planners.mesh(MASK, zigzag(48, 4), 2),
    "pieces": planners.needed_only(
        MASK,
        SequenceSharding(tuple(tuple((a, a + 3) for a in range(r * 3, 48, 12)) for r in range(4))),
        3,
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_merges_what_torch_merges(name, dtype):
    expected, expected_lse, none = attend(PLANS[name], dtype, fused=False)
    out, lse, merges = attend(PLANS[name], dtype, fused=True)
    assert merges > 0 and none == 0
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 if dtype.itemsize == 4 else 8e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)
    assert lse[40:].isneginf().all() and not out[40:].any()


def test_fp64_is_merged_in_fp64():
    expected, _, _ = attend(PLANS["ring"], torch.float64, fused=False)
    out, _, merges = attend(PLANS["ring"], torch.float64, fused=True)
    assert merges == 0 and torch.equal(out, expected)
