"""Jobs of ``test_on_npu`` on the emulated NPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import Mask, context_parallel_attention, contiguous, planners, zigzag
from tests.attention.test_executor import run
from tests.support import truth

SIZE, SCALE = 96, 0.3
MASKS = {
    "documents": Mask.documents((0, 5, 30, 31, 60, SIZE)),
    "window": Mask.documents((0, 40, SIZE), window=(7, 0)),
}
ALGORITHMS = {
    "ring": planners.ring,
    "all-gather": planners.all_gather,
    "needed only": planners.needed_only,
    "mesh": lambda mask, sharding: planners.mesh(mask, sharding, 2),
}


def _tensors() -> tuple[list[torch.Tensor], torch.Tensor]:
    *qkv, dout = (x.float() for x in truth.tensors(SIZE, 4, 2, 16, 16))
    return qkv, dout


def virtual_ranks() -> dict[tuple[str, str], float]:
    """Largest error of every algorithm, all ranks in one process on one device."""
    qkv, dout = _tensors()
    found = {}
    for name, mask in MASKS.items():
        expected = truth.attend(*(x.double() for x in (*qkv, dout)), mask.dense(), scale=SCALE)
        plans = {key: make(mask, zigzag(SIZE, 4)) for key, make in ALGORITHMS.items()}
        plans["one rank"] = planners.ring(mask, contiguous(SIZE, 1))
        for key, plan in plans.items():
            results, *_ = run(plan, tuple(x.npu() for x in qkv), dout.npu())
            found[name, key] = _error(results, expected)
    return found


def real_ranks() -> dict[str, float]:
    """The same of this rank, and the rows travel."""
    qkv, dout = _tensors()
    mask, found = MASKS["documents"], {}
    expected = truth.attend(*(x.double() for x in (*qkv, dout)), mask.dense(), scale=SCALE)
    sharding = zigzag(SIZE, dist.get_world_size())
    rows = sharding.positions(dist.get_rank())
    for name, make in ALGORITHMS.items():
        leaves = [x[rows].npu().requires_grad_() for x in qkv]
        out = context_parallel_attention(*leaves, make(mask, sharding), scale=SCALE)
        out.backward(dout[rows].npu())
        results = [out.detach(), *(x.grad for x in leaves)]
        found[name] = _error(results, [x[rows] for x in expected])
    return found


def _error(results: Any, expected: Any) -> float:
    pairs = zip(results, expected, strict=True)
    return max(float((got.cpu().double() - wanted).abs().max()) for got, wanted in pairs)
