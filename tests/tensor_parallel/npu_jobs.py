"""Overlapped products on tensors of an emulated NPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.instruments import CommLedger
from mindspeed.te import kernels
from mindspeed.tensor_parallel.products import OverlappedProducts
from mindspeed.tensor_parallel.strategy import OPERATIONS, Overlap

K, N = 512, 6
PLAIN = {name: getattr(kernels, name) for name in OPERATIONS}


class _Calls(TorchDispatchMode):
    """Products: fused ones with their mode of communication, others with their inner length."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if name.startswith("npu::") and "base" in name:
            self.found.append((name, kwargs.get("comm_mode")))
        elif name in ("aten::mm", "aten::addmm"):
            self.found.append((name, args[-1].shape[0]))
        return func(*args, **kwargs)


def products(overlap: Overlap, rows: int, k: int, n: int, addend: bool) -> dict[str, Any]:
    """Of each product: is it that of the formula, its calls, its collectives, and the formula's."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def whole(*shape: int) -> torch.Tensor:
        values = torch.randint(-1, 2, shape, generator=generator)
        return values.to(torch.bfloat16).npu()

    found = {}
    for name in OPERATIONS:
        given = (whole(rows, 1, k), whole(n, k), dist.group.WORLD)
        options: dict[str, Any] = {}
        if name == "gather_matmul":
            options = {"keep": True, "bias": whole(n)}
        elif addend:
            options = {"addend": whole(rows, 1, n)}
        copies = {key: v.clone() if key == "addend" else v for key, v in options.items()}
        with CommLedger() as expected:
            formula = PLAIN[name](*given, **copies)
        ours = OverlappedProducts(overlap, PLAIN).kernels()[name]
        with CommLedger() as ledger, _Calls() as calls:
            result = ours(*given, **options)
        equal = all(
            torch.equal(a.cpu(), b.cpu())
            for a, b in zip(result, formula, strict=True)
            if isinstance(a, torch.Tensor)
        )
        found[name] = equal, calls.found, _sent(ledger), _sent(expected)
    return found


def _sent(ledger: CommLedger) -> list[tuple[str, int]]:
    return [(event.op, event.wire) for event in ledger.events]
