"""Moving tokens to their experts and back, with or without weights, by a map of rows.

    rows [T, W] int32: the row that copy j of token t goes to

Entries below 0 are no copies and follow the token's copies; entries not below the number of rows
are copies that are dropped.

    moe_permute     out[rows[t, j]] = tokens[t]
    moe_unpermute   out[t] = sum_j probs[t, j] * permuted[rows[t, j]]

Each is the gradient of the other; both move every byte once, sum in fp32 in a fixed order (no
atomics), and keep no fp32 copy of ``[T k, H]``. The maps: ``sorted_indices`` of
:mod:`mindspeed.ops.compat.moe_token_permute` (W = k), Megatron's routing map (:func:`map_rows`,
W = experts) and the order of chunks (:func:`chunk_rows`, W = 1).

Bytes per element of ``[T, H]`` in bf16 with k = 2: permute 6 and 6 for its gradient (eager torch 6
and 14), unpermute with fp32 probs 6 and 10 (38 and 74).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random
from mindspeed.ops.registry import Operator, note_fallback, torch_npu, triton

_AT_ONCE = 64
"""Tokens or rows whose fp32 copies the CPU kernels hold at a time."""


def map_rows(routing_map: Tensor) -> Tensor:
    """Return the rows of Megatron's routing map, ordered by expert and then by token.

    Args:
        routing_map: ``[T, E]``, true where a token goes to an expert.

    Returns:
        ``[2, T, E]`` int32: the map of rows as :data:`MOE_PERMUTE` takes it, and the same rows at
        the places of their experts, -1 elsewhere.
    """
    tokens, experts = routing_map.shape
    routed = routing_map.bool()
    order = routed.t().reshape(-1).cumsum(0, dtype=torch.int32).sub_(1)
    by_expert = order.view(experts, tokens).t().masked_fill(~routed, -1)
    return torch.stack([pack(by_expert, by_expert, -1), by_expert])


def pack(values: Tensor, by_expert: Tensor, empty: float) -> Tensor:
    """Move each token's values at its experts to the front: ``[T, E]`` to ``[T, E]``.

    Args:
        values: ``[T, E]``, any dtype, differentiable.
        by_expert: int32 ``[T, E]``, second part of :func:`map_rows`.
        empty: fills the remaining columns.
    """
    tokens, experts = by_expert.shape
    routed = by_expert >= 0
    # Everything else is scattered to a dummy last column, which is sliced off.
    place = (routed.cumsum(1) - 1).masked_fill_(~routed, experts)
    packed = values.new_full((tokens, experts + 1), empty).scatter(1, place, values)
    return packed[:, :experts].contiguous()


def chunk_rows(sizes: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """Return ``[num_rows, 1]`` int32: where each row goes when chunks are put into ``order``.

    Args:
        sizes: rows of each chunk, ``[C]``.
        order: which chunk comes first, second, ..., ``[C]``.
        num_rows: sum of the sizes.
    """
    ends = sizes.cumsum(0)
    moved = sizes[order]
    starts = torch.empty_like(ends).scatter_(0, order, moved.cumsum(0) - moved)
    row = torch.arange(num_rows, device=sizes.device)
    shift = starts - (ends - sizes)
    chunk = torch.searchsorted(ends, row, right=True).clamp_(max=max(sizes.numel() - 1, 0))
    return (row + shift[chunk]).to(torch.int32).unsqueeze(1)


def _slots(rows: Tensor, num_rows: int) -> Tensor:
    """The index in the flat map of each row's source, -1 for rows without one."""
    return _inverse(rows, num_rows, torch.arange(rows.numel(), device=rows.device))


def _inverse(rows: Tensor, num_rows: int, values: Tensor) -> Tensor:
    """Scatter the values of the flat map to their rows; -1 for rows without one."""
    # Dropped copies are scattered to a dummy last row, which is sliced off.
    index = rows.reshape(-1).clamp(max=num_rows).long()
    index = index.masked_fill_(index < 0, num_rows)
    return torch.full((num_rows + 1,), -1, device=rows.device).scatter_(0, index, values)[:num_rows]


def _permute_reference(tokens: Tensor, rows: Tensor, num_rows: int, padded: bool) -> Tensor:
    if not rows.numel():
        return tokens.new_zeros(num_rows, tokens.shape[1])
    token = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1).expand_as(rows)
    source = _inverse(rows, num_rows, token.reshape(-1))
    out = tokens.index_select(0, source.clamp_min(0) if padded else source)
    return out.masked_fill_((source < 0).unsqueeze(1), 0) if padded else out


def _unpermute_reference(
    permuted: Tensor, rows: Tensor, probs: Tensor | None, padded: bool
) -> Tensor:
    num_rows, columns = permuted.shape
    kept = (rows >= 0) & (rows < num_rows)
    counts = kept.sum(1)
    starts = counts.cumsum(0) - counts
    row, weight = rows[kept], None if probs is None else probs[kept]
    if not row.numel():
        return permuted.new_zeros(rows.shape[0], columns)
    if weight is None or weight.dtype == permuted.dtype:
        return _sum_of_rows(permuted, row, starts, weight)
    # Weights of another dtype: blocks of tokens are converted, so that the copies stay in cache.
    wide = accumulation_dtype(permuted)
    out = permuted.new_empty(rows.shape[0], columns)
    bounds = [*starts[::_AT_ONCE].tolist(), row.numel()]
    for part, start, first, last in zip(
        out.split(_AT_ONCE), starts.split(_AT_ONCE), bounds, bounds[1:], strict=False
    ):
        if last == first:
            part.zero_()
            continue
        copies = permuted.index_select(0, row[first:last]).to(wide)
        here = torch.arange(last - first, device=row.device)
        part.copy_(_sum_of_rows(copies, here, start - first, weight[first:last].to(wide)))
    return out


def _sum_of_rows(x: Tensor, row: Tensor, starts: Tensor, weight: Tensor | None) -> Tensor:
    """Sum ``weight * x[row]`` from each start to the next, in fp32, without a copy."""
    return torch.embedding_bag(x, row, starts.to(row.dtype), False, 0, False, weight)[0]


def _unpermute_backward_reference(
    dy: Tensor, permuted: Tensor, rows: Tensor, probs: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(permuted)
    dpermuted = torch.zeros_like(permuted, memory_format=torch.contiguous_format)
    if not rows.numel() or not permuted.numel():
        return dpermuted, torch.zeros_like(probs, memory_format=torch.contiguous_format)
    slots = _slots(rows, permuted.shape[0])
    source = slots.clamp_min(0).div_(rows.shape[1], rounding_mode="floor")
    weight = probs.reshape(-1)[slots].to(wide).unsqueeze(1)
    products = torch.empty(permuted.shape[0], dtype=wide, device=rows.device)
    tensors = (dpermuted, permuted, source, weight, products)
    for out, x, token, scale, dots in zip(*(t.split(_AT_ONCE) for t in tensors), strict=True):
        grad = dy.index_select(0, token).to(wide)
        torch.sum(grad * x, -1, out=dots)
        out.copy_(grad.mul_(scale))
    nowhere = slots < 0
    if padded:
        dpermuted.masked_fill_(nowhere.unsqueeze(1), 0)
    dprobs = torch.zeros(rows.numel() + 1, dtype=wide, device=rows.device)
    dprobs.scatter_(0, slots.masked_fill_(nowhere, rows.numel()), products)
    return dpermuted, dprobs[:-1].view(probs.shape).to(probs.dtype)


_SORTED_NUMBERS, _SORTED_COPIES = 16777215, 512
_NPU_NOTE = (
    f"the plain formula runs for maps with {_SORTED_NUMBERS} entries or more, or more than "
    f"{_SORTED_COPIES} to a token (the experts of a routing map): limits of aclnnMoeTokenPermute"
)


def _npu_refuses(name: str, rows: Tensor) -> bool:
    """Whether torch_npu's kernels do not take a map; then says so once."""
    tokens, width = rows.shape
    if width <= _SORTED_COPIES and rows.numel() < _SORTED_NUMBERS:
        return False
    note_fallback(name, f"this map is [{tokens}, {width}]; {_NPU_NOTE}")
    return True


def _permute_npu(tokens: Tensor, rows: Tensor, num_rows: int, padded: bool) -> Tensor:
    # For the op, 0 rows are all.
    if not num_rows or not rows.numel() or _npu_refuses("moe_permute", rows):
        return _permute_reference(tokens, rows, num_rows, padded)
    # The op sorts by row number, which is the wanted order; entries that are no copy get the number
    # after the last row and are dropped.
    numbers = rows.masked_fill(rows < 0, num_rows) if padded else rows
    out = torch.ops.npu.npu_moe_token_permute(tokens, numbers, num_rows)[0]
    if not padded:
        return out  # type: ignore[no-any-return]
    if out.shape[0] < num_rows:
        out = torch.nn.functional.pad(out, (0, 0, 0, num_rows - out.shape[0]))
    return _without_tail(out, rows)


def _without_tail(permuted: Tensor, rows: Tensor) -> Tensor:
    """Zero in place the rows without a source; they are the last ones."""
    place = torch.arange(permuted.shape[0], device=rows.device)
    return permuted.masked_fill_((place >= (rows >= 0).sum()).unsqueeze(1), 0)


def _unpermute_npu(permuted: Tensor, rows: Tensor, probs: Tensor | None, padded: bool) -> Tensor:
    tokens, width = rows.shape
    if not rows.numel() or not permuted.numel():
        return permuted.new_zeros(tokens, permuted.shape[1])
    if _npu_refuses("moe_unpermute", rows):
        return _unpermute_reference(permuted, rows, probs, padded)
    flat = _npu_rows(rows, permuted)
    if probs is not None:
        return torch.ops.npu.npu_moe_token_unpermute(permuted, flat, probs)  # type: ignore[no-any-return]
    return torch.ops.npu.npu_moe_token_permute_grad_v2(  # type: ignore[no-any-return]
        permuted, flat, tokens, permuted.dtype, width
    )


def _unpermute_backward_npu(
    dy: Tensor, permuted: Tensor, rows: Tensor, probs: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    empty = not rows.numel() or not permuted.numel()
    if empty or _npu_refuses("moe_unpermute_backward", rows):
        return _unpermute_backward_reference(dy, permuted, rows, probs, padded)
    flat = _npu_rows(rows, permuted)
    dpermuted, dprobs = torch.ops.npu.npu_moe_token_unpermute_grad(
        permuted, dy.contiguous(), flat, probs
    )
    return _without_tail(dpermuted, rows) if padded else dpermuted, dprobs


def _npu_rows(rows: Tensor, permuted: Tensor) -> Tensor:
    """A flat map in which entries that are no copy are dropped like rows beyond the last."""
    return rows.reshape(-1).masked_fill(rows.reshape(-1) < 0, permuted.shape[0])


def _permute_fake(tokens: Tensor, rows: Tensor, num_rows: int, padded: bool) -> Tensor:
    return tokens.new_empty(num_rows, tokens.shape[1])


def _unpermute_fake(permuted: Tensor, rows: Tensor, probs: Tensor | None, padded: bool) -> Tensor:
    return permuted.new_empty(rows.shape[0], permuted.shape[1])


def _unpermute_backward_fake(
    dy: Tensor, permuted: Tensor, rows: Tensor, probs: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    return permuted.new_empty(permuted.shape), probs.new_empty(probs.shape)


def _permute_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rows, _, ctx.padded = inputs
    ctx.save_for_backward(rows)


def _permute_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (rows,) = ctx.saved_tensors
    return MOE_UNPERMUTE(dy, rows, None, ctx.padded), None, None, None


def _unpermute_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    permuted, rows, probs, ctx.padded = inputs
    ctx.num_rows = permuted.shape[0]
    weighted = probs is not None
    ctx.save_for_backward(rows, *((permuted, probs) if weighted else ()))


def _unpermute_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows, *weighted = ctx.saved_tensors
    if not weighted:
        return MOE_PERMUTE(dy, rows, ctx.num_rows, ctx.padded), None, None, None
    permuted, probs = weighted
    dpermuted, dprobs = MOE_UNPERMUTE_BACKWARD(dy, permuted, rows, probs, ctx.padded)
    return dpermuted, None, dprobs, None


def _maps() -> Iterator[tuple[Tensor, int, bool]]:
    """Maps with the number of rows, and whether there are rows without a source."""
    generator = torch.Generator().manual_seed(0)
    for tokens, width in ((7, 2), (33, 3), (5, 1), (1, 8)):
        rows = torch.randperm(tokens * width, generator=generator).view(tokens, width).int()
        yield rows, tokens * width, False
        yield rows, max(tokens * width - 4, 1), False
    routed = torch.rand(19, 6, generator=generator) < 0.4
    routed[3], routed[:, 2] = False, False
    rows = map_rows(routed)[0]
    pairs = int(routed.sum())
    yield rows, pairs, True
    yield rows, pairs + 5, True
    yield rows, pairs - 7, True
    yield map_rows(torch.zeros(4, 2).bool())[0], 3, True
    yield torch.zeros(0, 2, dtype=torch.int32), 0, False


def _permute_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for (rows, num_rows, padded), columns in zip(_maps(), _COLUMNS, strict=True):
        yield random((rows.shape[0], columns), dtype), rows, num_rows, padded


def _unpermute_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for (rows, num_rows, padded), columns in zip(_maps(), _COLUMNS, strict=True):
        permuted = random((num_rows, columns), dtype)
        yield permuted, rows, None, padded
        yield permuted, rows, random(rows.shape, dtype, seed=1), padded
        wide = torch.float32 if dtype != torch.float64 else dtype
        yield permuted, rows, random(rows.shape, wide, seed=1), padded


def _unpermute_backward_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for permuted, rows, probs, padded in _unpermute_samples(dtype):
        if probs is not None:
            dy = random((rows.shape[0], permuted.shape[1]), dtype, seed=2)
            yield dy, permuted, rows, probs, padded


_COLUMNS = (8, 5, 1030, 16, 1, 24, 3, 8, 96, 7, 8, 4, 8)


def _permute_workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    rows = torch.arange(2 * WORKLOAD_ROWS, dtype=torch.int32, device=device).view(2, -1).t()
    tokens = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    return tokens, rows.contiguous(), 2 * WORKLOAD_ROWS, False


def _unpermute_workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    _, rows, num_rows, padded = _permute_workload(hidden, dtype, device)
    permuted = torch.ones(num_rows, hidden, dtype=dtype, device=device)
    return permuted, rows, torch.ones(rows.shape, dtype=torch.float32, device=device), padded


def _unpermute_backward_workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    dy = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    return dy, *_unpermute_workload(hidden, dtype, device)


MOE_PERMUTE = Operator(
    "moe_permute(Tensor tokens, Tensor rows, SymInt num_rows, bool padded) -> Tensor",
    reference=_permute_reference,
    fake=_permute_fake,
    cuda=[triton("moe_permutation:permute")],
    npu=[torch_npu(_permute_npu, "npu_moe_token_permute", note=_NPU_NOTE)],
    autograd=(_permute_save, _permute_backward),
    samples=_permute_samples,
    workload=_permute_workload,
    public="mindspeed.ops.npu_moe_token_permute.npu_moe_token_permute",
)

MOE_UNPERMUTE = Operator(
    "moe_unpermute(Tensor permuted, Tensor rows, Tensor? probs, bool padded) -> Tensor",
    reference=_unpermute_reference,
    fake=_unpermute_fake,
    cuda=[triton("moe_permutation:unpermute")],
    npu=[
        torch_npu(
            _unpermute_npu,
            "npu_moe_token_unpermute",
            "npu_moe_token_permute_grad_v2",
            note=_NPU_NOTE,
        )
    ],
    autograd=(_unpermute_save, _unpermute_backward),
    samples=_unpermute_samples,
    workload=_unpermute_workload,
    public="mindspeed.ops.npu_moe_token_unpermute.npu_moe_token_unpermute",
)

MOE_UNPERMUTE_BACKWARD = Operator(
    "moe_unpermute_backward(Tensor dy, Tensor permuted, Tensor rows, Tensor probs, bool padded)"
    " -> (Tensor, Tensor)",
    reference=_unpermute_backward_reference,
    fake=_unpermute_backward_fake,
    cuda=[triton("moe_permutation:unpermute_backward")],
    npu=[torch_npu(_unpermute_backward_npu, "npu_moe_token_unpermute_grad", note=_NPU_NOTE)],
    samples=_unpermute_backward_samples,
    workload=_unpermute_backward_workload,
)
