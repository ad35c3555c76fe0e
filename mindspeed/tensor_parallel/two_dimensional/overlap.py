"""Products that hide a collective of the grid behind them.

    gather_matmul     ring: multiply own rows while the next rank's rows arrive, then those, ...
    matmul_scatter    chunks: multiply some rows while the sums of the rows before are sent

Both send the bytes of the collective that they replace, and results are equal to the bit where the
products of single rows are. Arguments and results as in :mod:`mindspeed.te.kernels`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.ops import _overlap


def gather_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    transposed: bool = True,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(x of all ranks) W^T``, or ``... W`` with ``transposed=False``, in a ring.

    Rows go from each rank to the one before it; both directions of a step are one batch, so no
    order of sends and receives can block and one communicator is enough.

    Args:
        x: ``[m, b, k]``, this rank's rows, dtype of the weight.
        weight: ``[n, k]``; ``[k, n]`` with ``transposed=False``.
        group: The ranks that share the rows.
        transposed: Multiply with the transposed weight.
        keep: Return the gathered x as well.

    Returns:
        ``[p m, b, n]``, and ``[p m, b, k]`` or None.
    """
    matrix = weight.t() if transposed else weight
    size, rank = group.size(), group.rank()
    block = x.contiguous()
    out = x.new_empty((size, *x.shape[:-1], matrix.shape[1]))
    whole = x.new_empty((size, *x.shape)) if keep else None
    for step in range(size):
        owner, under_way, following = (rank + step) % size, [], block
        if step + 1 < size:
            following = torch.empty_like(block)
            under_way = _exchange(block, following, group)
        torch.mm(block.flatten(0, -2), matrix, out=out[owner].flatten(0, -2))
        if whole is not None:
            whole[owner] = block
        for work in under_way:
            work.wait()
        block = following
    return out.flatten(0, 1), None if whole is None else whole.flatten(0, 1)


def _exchange(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    size, rank = group.size(), group.rank()
    before = dist.get_global_rank(group, (rank - 1) % size)
    after = dist.get_global_rank(group, (rank + 1) % size)
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, before, group),
            dist.P2POp(dist.irecv, received, after, group),
        ]
    )


def matmul_scatter(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``x W^T`` summed over the ranks, this rank's rows of it, in chunks of rows.

    There are as many chunks as ranks, or the largest divisor of that which divides the rows.

    Args:
        x: ``[s, b, k]``, dtype of the weight.
        weight: ``[n, k]``.
        group: The p ranks.

    Returns:
        ``[s/p, b, n]``.
    """
    ranks = group.size()
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:-1], weight.shape[0]))
    rows = out.view(-1, out.shape[-1])
    chunks = math.gcd(rows.shape[0], ranks)
    _overlap.matmul_reduce_scatter(x.reshape(-1, x.shape[-1]), weight.t(), rows, group, chunks)
    return out
