"""Matrix products that hide their collective: one chunk of rows is computed, one is sent.

    chunks = 1   |--- matmul ---|------ all_reduce ------|
    chunks = 4   |mm|mm|mm|mm|
                    |--ar--|--ar--|--ar--|--ar--|

With one chunk this is the plain composition of torch.distributed, and the reference. More chunks
send the same bytes in more collectives; a collective of T seconds and a product of C seconds
then take max(C, T) + min(C, T) / chunks instead of C + T.

Layouts: a ``[m, k]``, b ``[k, n]``, out ``[m, n]``; rows sharded over p ranks are
``[m / p, ...]`` on each, by rank. All functions write into given tensors. ``b`` may have more rows
than a has columns, zeros that align its length for an NPU: a is padded to them chunk by chunk,
after it was sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Start = Callable[[int], dist.Work]
Finish = Callable[[int], None]


def pipeline(chunks: int, start: Start, finish: Finish) -> None:
    """Start chunk i + 1 before waiting for chunk i.

    Args:
        chunks: how many there are, at least 1.
        start: issues the collective of a chunk, after computing its input if there is one.
        finish: consumes the result of the collective of that chunk.
    """
    under_way = start(0)
    for i in range(chunks):
        ready, following = under_way, i + 1 < chunks
        if following:
            under_way = start(i + 1)
        ready.wait()
        finish(i)


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    group: dist.ProcessGroup,
    chunks: int,
    addend: Tensor | None = None,
) -> None:
    """``out = sum over ranks of (a @ b + addend)``; moves ``[m, n]`` in ``chunks`` all-reduces.

    ``a`` is ``[m, k]``, ``b`` ``[k, n]``, ``out`` and ``addend`` are ``[m, n]`` and may be one
    tensor, all of one dtype.
    """
    parts, results = a.chunk(chunks), out.chunk(chunks)
    addends = [None] * chunks if addend is None else addend.chunk(chunks)

    def start(i: int) -> dist.Work:
        _product(parts[i], b, addends[i], results[i])
        return _issued(dist.all_reduce(results[i], group=group, async_op=True))

    pipeline(len(parts), start, lambda i: None)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    group: dist.ProcessGroup,
    chunks: int,
    addend: Tensor | None = None,
) -> None:
    """``out = this rank's rows of the sum of a @ b + addend``; reduce-scatters ``[m, n]`` in all.

    Chunk i holds part i of every rank's rows, so that its piece of ``out`` is contiguous. ``a`` is
    ``[m, k]``, ``b`` ``[k, n]``, ``addend`` ``[m, n]`` and ``out`` ``[m / ranks, n]``, all of one
    dtype.
    """
    ranks = group.size()
    results = out.chunk(chunks)
    partial: list[Tensor | None] = [None] * chunks

    def rows_of(x: Tensor, i: int) -> Tensor:
        return x.view(ranks, chunks, -1, x.size(1))[:, i].reshape(-1, x.size(1))

    def start(i: int) -> dist.Work:
        partial[i] = _product(rows_of(a, i), b, None if addend is None else rows_of(addend, i))
        work = dist.reduce_scatter_tensor(results[i], partial[i], group=group, async_op=True)
        return _issued(work)

    def finish(i: int) -> None:
        partial[i] = None  # it had to live until it was sent

    pipeline(chunks, start, finish)


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    gathered: Tensor | None,
    group: dist.ProcessGroup,
    chunks: int,
    bias: Tensor | None = None,
) -> None:
    """``out = (a of all ranks) @ b + bias``; gathers ``[m, k]``, into ``gathered`` if given.

    Without ``gathered [m, k]``, two chunks of it are in memory at a time. ``a`` is
    ``[m / ranks, k]``, ``b`` ``[k, n]``, ``bias`` ``[n]`` and ``out`` ``[m, n]``, all of one dtype.
    """
    ranks, k = group.size(), a.size(1)
    parts = a.chunk(chunks)
    chunked_out = out.view(ranks, chunks, -1, out.size(1))
    whole = None if gathered is None else gathered.view(ranks, chunks, -1, k)
    arriving: list[Tensor | None] = [None] * chunks

    def start(i: int) -> dist.Work:
        direct = gathered is not None and chunks == 1
        arriving[i] = gathered if direct else a.new_empty(ranks * parts[i].size(0), k)
        work = dist.all_gather_into_tensor(
            arriving[i], parts[i].contiguous(), group=group, async_op=True
        )
        return _issued(work)

    def finish(i: int) -> None:
        rows = arriving[i]
        assert rows is not None
        if chunks == 1:
            _product(rows, b, bias, out)
            return
        chunked_out[:, i] = _product(rows, b, bias).view(ranks, -1, out.size(1))
        if whole is not None:
            whole[:, i] = rows.view(ranks, -1, k)
        arriving[i] = None

    pipeline(chunks, start, finish)


def _product(
    a: Tensor, b: Tensor, addend: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``a @ b + addend``; see the module for a padded b."""
    if b.size(0) > a.size(1):
        a = F.pad(a, (0, b.size(0) - a.size(1)))
    return torch.mm(a, b, out=out) if addend is None else torch.addmm(addend, a, b, out=out)


def _issued(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None would mean that this process is not in the group
    return work
