"""Linear layers and models with overlapped products, on the ranks of one tensor-parallel group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

import mindspeed
from mindspeed import session
from mindspeed.testing import CommLedger
from tests.support import gpt_ranks
from tests.te import linear_ranks

ROWS, BATCH = 16, 4  # 64 rows: 8 parts of those of a rank, also of 4 ranks


def whole(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of ``linear_ranks.whole``, with whole numbers: every sum of them is exact."""
    generator = torch.Generator().manual_seed(7)
    sizes = {"x": (ROWS, BATCH, linear_ranks.IN), "grad": (ROWS, BATCH, linear_ranks.OUT)}
    sizes |= {"weight": (linear_ranks.OUT, linear_ranks.IN), "bias": (linear_ranks.OUT,)}
    sizes |= {"A": (linear_ranks.R, linear_ranks.IN), "B": (linear_ranks.OUT, linear_ranks.R)}
    return {
        name: torch.randint(-2, 3, size, generator=generator).to(dtype)
        for name, size in sizes.items()
    }


def layers(configurations: list[dict[str, Any]], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Output, gradients and collectives of every kind of layer, in each configuration."""
    gpt_ranks.start(dist.get_world_size())
    linear_ranks.whole = whole
    kinds = ("te", "ops", "converted")
    cases = [c for c in linear_ranks.cases(dist.get_world_size()) if c.kind in kinds]
    found = []
    for flags in configurations:
        mindspeed.configure(**flags)
        results = {}
        for case in cases:
            with CommLedger() as ledger:
                tensors = linear_ranks.step(case, dtype)
            results[case] = tensors, [(e.phase, e.op, e.payload) for e in ledger.events]
        found.append(results)
        session.current().detach_features()
    return found


def model(
    configurations: list[dict[str, Any]],
    name: str,
    spec: str,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> list[tuple[dict[str, torch.Tensor], Counter[str], int]]:
    """Loss and gradients of a model, and calls and bytes of its collectives."""
    size, found = dist.get_world_size(), []
    for flags in configurations:
        mindspeed.configure(**flags)
        if not found:
            gpt_ranks.start(size)
        parallel = {"tensor_model_parallel_size": size, "sequence_parallel": True}
        config = gpt_ranks.config(name, **(parallel | overrides))
        built = gpt_ranks.build(config, spec).to(dtype)
        with CommLedger() as ledger:
            tensors = gpt_ranks.run(built)
        found.append((tensors, Counter(e.op for e in ledger.events), ledger.wire_bytes()))
        session.current().detach_features()
    return found
