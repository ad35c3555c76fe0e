"""Any computation on rows with any collective, in either order, in parts that overlap.

    in_parts(x, lambda rows: rows @ w, "all_reduce", group, parts=4)
    in_parts(x, lambda rows: rows @ w, "all_reduce", group, parts=4, compute_first=False)

================  ===============================  ============================  =================
collective        result, computation first        communication first           rows of the result
================  ===============================  ============================  =================
all_reduce        sum over ranks of f(x)           f(sum over ranks of x)        m
all_gather        f(x) of all ranks, by rank       f(x of all ranks)             p m
reduce_scatter    own rows of the sum of f(x)      f(own rows of the sum of x)   m / p
================  ===============================  ============================  =================

The bytes are those of one collective of f(x), or of x; the calls are as many as the parts. Linear
layers use :mod:`mindspeed.ops.overlap`, which writes into given memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.ops.overlap import pipeline

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
Compute = Callable[[torch.Tensor], torch.Tensor]


def in_parts(
    x: torch.Tensor,
    compute: Compute,
    collective: Collective,
    group: dist.ProcessGroup,
    parts: int,
    compute_first: bool = True,
) -> torch.Tensor:
    """Compute and communicate in parts of the rows; not differentiable.

    Args:
        x: ``[m, k]``, any dtype; it is not written to.
        compute: from rows ``[rows, k]`` to ``[rows, n]``, row by row; it returns new memory.
        collective: what is done with its result, or with x.
        group: the p ranks.
        parts: divides m, and m / p with ``reduce_scatter``.
        compute_first: compute, then communicate, or the other way round.

    Returns:
        ``[rows, n]``; the table in the module says which rows.

    Raises:
        ConfigError: the parts do not divide the rows.
    """
    ranks = group.size()
    shared = ranks if collective == "reduce_scatter" else 1
    if parts < 1 or x.size(0) % (parts * shared):
        raise ConfigError(
            f"{x.size(0)} rows cannot be divided into {parts} parts"
            + (f" for each of {ranks} ranks" if shared > 1 else "")
        )
    gathered: list[torch.Tensor | None] = [None] * parts
    sent: list[torch.Tensor | None] = [None] * parts  # alive until it has arrived
    results: list[torch.Tensor] = []

    def rows_of(i: int) -> torch.Tensor:
        if collective == "reduce_scatter":  # part i of every rank's rows
            return x.view(ranks, parts, -1, x.size(1))[:, i].reshape(-1, x.size(1))
        return x.chunk(parts)[i]

    def start(i: int) -> dist.Work:
        rows = rows_of(i)
        given = compute(rows) if compute_first else rows.clone()
        sent[i], gathered[i], work = _started(given, collective, group)
        return work

    def finish(i: int) -> None:
        received = gathered[i]
        assert received is not None
        results.append(received if compute_first else compute(received))
        sent[i] = gathered[i] = None

    pipeline(parts, start, finish)
    if collective != "all_gather":
        return torch.cat(results)
    by_rank = [part.view(ranks, -1, part.size(1)) for part in results]
    return torch.cat(by_rank, 1).flatten(0, 1)


def _started(
    rows: torch.Tensor, collective: Collective, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, dist.Work]:
    """Tensor that is sent, tensor that is received, and the handle."""
    if collective == "all_reduce":
        work = dist.all_reduce(rows, group=group, async_op=True)
        return rows, rows, work
    if collective == "all_gather":
        received = rows.new_empty(rows.size(0) * group.size(), rows.size(1))
        work = dist.all_gather_into_tensor(received, rows.contiguous(), group=group, async_op=True)
    else:
        received = rows.new_empty(rows.size(0) // group.size(), rows.size(1))
        work = dist.reduce_scatter_tensor(received, rows.contiguous(), group=group, async_op=True)
    return rows, received, work
