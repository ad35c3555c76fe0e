"""Linear layers and models with overlapped products, on the ranks of one tensor-parallel group."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import mindspeed
from mindspeed import session
from mindspeed.instruments import CommLedger, saved_for_backward
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


class Result(NamedTuple):
    """Of one model: loss and gradients, collectives, bytes sent, bytes saved for backward, log."""

    tensors: dict[str, torch.Tensor]
    calls: Counter[tuple[str, str]]
    sent: int
    saved: int
    log: list[str]


def models(given: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> list[Result]:
    """Forward and backward of models with sequence parallelism.

    Args:
        given: name of a configuration of ``gpt_ranks``, spec, flags, values of the config.
    """
    return [_model(*one) for one in given]


def _model(name: str, spec: str, flags: dict[str, Any], overrides: dict[str, Any]) -> Result:
    from megatron.core import parallel_state

    size, records = dist.get_world_size(), []
    logger = logging.getLogger("mindspeed")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    mindspeed.configure(**flags)
    if not parallel_state.model_parallel_is_initialized():
        gpt_ranks.start(size)
    parallel = {"tensor_model_parallel_size": size, "sequence_parallel": True}
    built = gpt_ranks.build(gpt_ranks.config(name, **(parallel | overrides)), spec)
    logger.addHandler(handler)
    with CommLedger() as ledger, saved_for_backward(built) as saved:
        tensors = gpt_ranks.run(built)
    logger.removeHandler(handler)
    session.current().detach_features()
    calls = Counter((event.phase, event.op) for event in ledger.events)
    return Result(tensors, calls, ledger.wire_bytes(), saved.bytes, records)


def odd_rows() -> tuple[list[str], list[int]]:
    """The log, and the numbers of parts, of the three products with 12 rows to divide, twice."""
    from mindspeed.te import kernels
    from mindspeed.tensor_parallel.products import OverlappedProducts
    from mindspeed.tensor_parallel.strategy import OPERATIONS, Overlap

    plain = {name: getattr(kernels, name) for name in OPERATIONS}
    products, world = OverlappedProducts(Overlap(parts=8), plain).kernels(), dist.group.WORLD
    records, parts = [], []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mindspeed").addHandler(handler)
    for name, rows in zip(OPERATIONS, (12, 24, 12), strict=True):
        for columns in (5, 7):  # said once, not for each shape
            x, weight = torch.ones(rows, 1, 3), torch.ones(columns, 3)
            with CommLedger() as ledger:
                ours, other = products[name](x, weight, world), plain[name](x, weight, world)
            assert torch.equal(ours[0], other[0])
        parts.append(len(ledger.events) - 1)
    return records, parts


def trained(flags: list[str], metrics: str) -> tuple[Counter[tuple[str, str]], int]:
    """Train on this rank: calls of each phase and collective over tensor-parallel ranks, bytes.

    Messages of a few bytes are not those of layers, and their number differs between runs.
    """
    from tests.training import matrix_job

    with CommLedger() as ledger:
        matrix_job.train([*flags, "--metrics-file", metrics])
    events = [
        event for event in ledger.select(group="TENSOR_MODEL_PARALLEL_GROUP") if event.payload >= 64
    ]
    calls = Counter((event.phase, event.op) for event in events)
    return calls, sum(event.wire for event in events)
