"""Products of groups of rows with one matrix per group, forward and both gradients.

    y[g]  = x[g] @ w[g] (+ b[g])      grouped_matmul(x, w, b, ends)
    dx[g] = dy[g] @ w[g]^T            grouped_matmul(dy, w^T, None, ends)
    dw[g] = x[g]^T @ dy[g]            grouped_outer(x, dy, ends)

``ends`` is the row after the last of each group, int64 on the rows' device, so that nothing waits
for the host. Three launches instead of three per group; 6 T K N FLOPs. The two operators are each
other's gradients. Public functions: :mod:`mindspeed.ops.compat.gmm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, product_flops, random
from mindspeed.ops.registry import Operator, plain_torch, torch_npu


def cumulative(
    check: ArgumentCheck,
    argument: str,
    groups: Tensor | Sequence[int] | None,
    x: Tensor,
    *,
    sizes: bool = False,
) -> Tensor:
    """Return the cumulative group sizes, ``[E]`` int64 on the device of ``x``.

    Args:
        argument: name of ``groups`` in the public function.
        groups: sizes or cumulative sums, a list of numbers or an int64 tensor.
        x: ``[T, ...]``, the rows that are grouped.
        sizes: ``groups`` holds sizes.

    Raises:
        OperatorError: nothing given; wrong dtype or device; values (checked where reading them is
            free) that decrease, are negative or do not end at T.
    """
    if not isinstance(groups, Tensor):
        if not _is_list_of_integers(groups):
            what = f"a group for each of the {x.shape[0]} rows, an int64 tensor or a list"
            check.fail(argument, what, groups)
        groups = torch.tensor(groups, dtype=torch.int64).to(x.device)
    check.dtype((torch.int64,), **{argument: groups})
    check.rank(1, **{argument: groups})
    check.require(groups.numel() > 0, argument, "at least one group", groups)
    check.require(
        groups.device == x.device, argument, f"the device of the rows, {x.device}", groups.device
    )
    ends = groups.cumsum(0) if sizes else groups
    if check.values_known(groups):
        given, rows = groups.tolist(), x.shape[0]
        if sizes:
            fits = min(given) >= 0 and sum(given) == rows
            check.require(fits, argument, f"sizes that add up to the {rows} rows", given)
        else:
            fits = given[-1] == rows and given == sorted(given) and given[0] >= 0
            check.require(fits, argument, f"sums that never decrease and end at {rows}", given)
    return ends


def _is_list_of_integers(groups: object) -> TypeGuard[Sequence[int]]:
    kinds = (Integral, torch.SymInt)
    return isinstance(groups, (list, tuple)) and all(isinstance(n, kinds) for n in groups)


def sample_ends(sizes: Sequence[int]) -> Tensor:
    """Cumulative sums of ``sizes``, int64 ``[E]`` on the CPU, for the samples of an operator."""
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int64)


def product(left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``left @ right (+ bias)`` into ``out`` on the CPU: fp32 sums, one rounding.

    Args:
        left: ``[m, k]``.
        right: ``[k, n]``, dtype of left.
        bias: ``[n]``, any floating dtype, or None.
        out: ``[m, n]``, dtype of left; overwritten.
    """
    # torch's fp16 product is some fifty times slower on a CPU than converting and using fp32; a
    # bias of another dtype or a 16-bit product plus bias would be rounded twice.
    if left.dtype == torch.float16 or (bias is not None and left.dtype.itemsize == 2):
        wide = left.float() @ right.float()
        out.copy_(wide if bias is None else wide.add_(bias))
    elif bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(bias.to(left.dtype), left, right, out=out)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            b = None if bias is None else bias[group]
            product(x[start:end], weight[group], b, out[start:end])
        start = end
    return out


def _outer_reference(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])
    start = 0
    for part, end in zip(out, ends.tolist(), strict=True):
        if end > start:
            product(x[start:end].t(), dy[start:end], None, part)
        else:
            part.zero_()
        start = end
    return out


def product_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Multiply by ``torch.nn.functional.grouped_mm``; the host waits for nothing, fp64 aside.

    Args:
        x: ``[T, K]``; rows after the last end are undefined in the result.
        weight: ``[E, K, N]`` in the dtype of x.
        bias: ``[E, N]``, or None.
        ends: int64 ``[E]``.

    Returns:
        ``[T, N]``.
    """
    if x.dtype == torch.float64 or not x.shape[0]:
        return _reference(x, weight, bias, ends)
    inner, outer = -weight.shape[1] % _step(x), -weight.shape[2] % _step(x)
    rows = F.pad(x, (0, inner)) if inner else x.contiguous()
    weight = F.pad(weight, (0, outer, 0, inner)) if inner or outer else _dense(weight)
    y = F.grouped_mm(rows, weight, offs=ends.to(torch.int32))
    y = y[:, : y.shape[1] - outer].contiguous() if outer else y
    if bias is None:
        return y
    group = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    return (y + bias[group]).to(x.dtype)


def outer_by_torch(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """``x^T dy`` of each group, likewise.

    Args:
        x: ``[T, K]``; rows after the last end are not read.
        dy: ``[T, N]`` in the dtype of x.
        ends: int64 ``[E]``.

    Returns:
        ``[E, K, N]``; zero for an empty group.
    """
    if x.dtype == torch.float64 or not x.shape[0]:
        return _outer_reference(x, dy, ends)
    inner, outer = -x.shape[1] % _step(x), -dy.shape[1] % _step(x)
    left = F.pad(x, (0, inner)) if inner else x.contiguous()
    right = F.pad(dy, (0, outer)) if outer else dy.contiguous()
    out = F.grouped_mm(left.t(), right, offs=ends.to(torch.int32))
    return out[:, : x.shape[1], : dy.shape[1]].contiguous() if inner or outer else out


def _step(x: Tensor) -> int:
    """The kernels take rows of whole 16 bytes; this many elements."""
    return 16 // x.dtype.itemsize


def _dense(weight: Tensor) -> Tensor:
    """One matrix after the other, each in rows or in columns."""
    inner, outer = weight.shape[1:]
    if weight.stride() in ((inner * outer, outer, 1), (inner * outer, 1, inner)):
        return weight
    return weight.contiguous()


def _torch_refused() -> str | None:
    if hasattr(F, "grouped_mm"):
        return None
    return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"


def _npu(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[2])
    return npu_grouped_matmul(
        [x.contiguous()],
        [weight],
        bias=None if bias is None else [bias],
        group_list=ends,
        group_type=0,
    )


def _outer_npu(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    if not x.shape[0]:
        return x.new_zeros(ends.shape[0], x.shape[1], dy.shape[1])
    return npu_grouped_matmul(
        [x.contiguous().t()], [dy.contiguous()], group_list=ends, group_type=2
    )


def npu_grouped_matmul(x: list[Any], weight: list[Any], **options: Any) -> Tensor:
    """Call torch_npu's grouped product with one joined output and cumulative group sizes.

    Args:
        x: one tensor ``[T, K]`` with the rows of all groups, or ``[K, T]`` as ``group_type`` says.
        weight: one tensor, ``[E, K, N]`` (or ``[T, N]`` for ``group_type`` 2), dtype as torch_npu
            documents for the form.
        **options: of ``torch_npu.npu_grouped_matmul``.

    Returns:
        ``[T, N]`` (or ``[E, K, N]``).
    """
    (out,) = torch.ops.npu.npu_grouped_matmul(x, weight, split_item=3, group_list_type=0, **options)
    return out  # type: ignore[no-any-return]


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _outer_fake(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ends = inputs
    ctx.save_for_backward(x, weight, ends)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = GROUPED_MATMUL(dy, weight.transpose(1, 2), None, ends)
    if ctx.needs_input_grad[1]:
        if in_columns(weight):  # a gradient in the memory layout of the weight
            dw = GROUPED_OUTER(dy, x, ends).transpose(1, 2)
        else:
            dw = GROUPED_OUTER(x, dy, ends)
    if ctx.needs_input_grad[2]:
        db = GROUPED_OUTER(dy.new_ones(dy.shape[0], 1), dy, ends).squeeze(1)
    return dx, dw, db, None


def in_columns(weight: Tensor) -> bool:
    """Whether the matrices of ``weight [E, K, N]`` (any dtype) are views of their transposes."""
    return weight.stride(2) != 1 and weight.stride(1) == 1


def _outer_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _outer_backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    x, dy, ends = ctx.saved_tensors
    dx = GROUPED_MATMUL(dy, dw.transpose(1, 2), None, ends) if ctx.needs_input_grad[0] else None
    ddy = GROUPED_MATMUL(x, dw, None, ends) if ctx.needs_input_grad[1] else None
    return dx, ddy, None


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for sizes, inner, outer in _SHAPES:
        x = random((sum(sizes), inner), dtype)
        weight = random((len(sizes), inner, outer), dtype, seed=1)
        yield x, weight, None, sample_ends(sizes)
        columns = random((len(sizes), outer, inner), dtype, seed=1).transpose(1, 2)
        yield x, columns, random((len(sizes), outer), dtype, seed=2), sample_ends(sizes)


def _outer_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for sizes, inner, outer in _SHAPES:
        rows = sum(sizes)
        yield random((rows, inner), dtype), random((rows, outer), dtype, seed=1), sample_ends(sizes)
    yield random((5, 6), dtype).t(), random((6, 4), dtype, seed=1), sample_ends((2, 4))


_SHAPES: Sequence[tuple[tuple[int, ...], int, int]] = (
    ((3, 0, 5), 8, 16),
    ((1, 20, 0, 12), 24, 7),
    ((0, 0), 4, 8),
    ((6,), 1, 1),
)


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    weight = torch.ones(8, hidden, 1024, dtype=dtype, device=device)
    return x, weight, None, torch.arange(1, 9, device=device) * (WORKLOAD_ROWS // 8)


def _outer_workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x, _, _, ends = _workload(hidden, dtype, device)
    return x, torch.ones(WORKLOAD_ROWS, 1024, dtype=dtype, device=device), ends


GROUPED_MATMUL = Operator(
    "grouped_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor ends) -> Tensor",
    reference=_reference,
    fake=_fake,
    cuda=[plain_torch(product_by_torch, _torch_refused)],
    npu=[torch_npu(_npu, "npu_grouped_matmul")],
    autograd=(_save, _backward),
    flops=product_flops,
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.gmm.npu_gmm",
)

GROUPED_OUTER = Operator(
    "grouped_outer(Tensor x, Tensor dy, Tensor ends) -> Tensor",
    reference=_outer_reference,
    fake=_outer_fake,
    cuda=[plain_torch(outer_by_torch, _torch_refused)],
    npu=[torch_npu(_outer_npu, "npu_grouped_matmul")],
    autograd=(_outer_save, _outer_backward),
    flops=product_flops,
    samples=_outer_samples,
    workload=_outer_workload,
    public="mindspeed.ops.gmm.npu_gmm",
)


def fused_grouped_matmul(
    inputs: Tensor, m_split: Tensor | Sequence[int], weights: Tensor
) -> Tensor:
    """``y[g] = x[g] @ w[g]``, by the original's names in this module.

    Args:
        inputs: ``[T, K]``, rows sorted by group.
        m_split: rows of each group, an int64 tensor ``[E]`` or a list.
        weights: ``[E, K, N]``, or ``[E, N, K]`` where N is not K.

    Returns:
        ``[T, N]``.
    """
    check = ArgumentCheck("fused_grouped_matmul")
    check.rank(2, inputs=inputs)
    check.rank(3, weights=weights)
    matrices = weights if weights.shape[1] == inputs.shape[1] else weights.transpose(1, 2)
    check.shape((weights.shape[0], inputs.shape[1], matrices.shape[2]), weights=matrices)
    ends = cumulative(check, "m_split", m_split, inputs, sizes=True)
    return GROUPED_MATMUL(inputs, matrices, None, ends)  # type: ignore[no-any-return]


eager_grouped_matmul = fused_grouped_matmul
