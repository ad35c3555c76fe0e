"""Several matrix products whose results are summed over a group in one collective.

    y_i = all_reduce(x_i @ w_i + bias_i)        i = 0 .. groups - 1

Each rank holds a slice of the inner dimension of every product. All results lie in one buffer, so
that one all-reduce carries them, whatever their number. Forward only. Source: the operator of the
same name in CANN; torch_npu has it no more, so its grouped product precedes the all-reduce there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops.process_groups import group_name, resolve
from mindspeed.ops.registry import Operator, torch_npu

__all__ = ["npu_grouped_mat_mul_all_reduce"]

MOST_GROUPS = 64

_check = ArgumentCheck("npu_grouped_mat_mul_all_reduce")


def npu_grouped_mat_mul_all_reduce(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    hcomm: dist.ProcessGroup | str,
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    split_item: int = 0,
    reduce_op: str = "sum",
    comm_turn: int = 0,
) -> list[Tensor]:
    """Multiply group by group and sum over the ranks of ``hcomm``.

    ==========  =================================  =======================================
    split_item  x                                  returns
    ==========  =================================  =======================================
    0           one ``[m_i, k_i]`` per group       one ``[m_i, n_i]`` per group
    1           one ``[m, k]``, split by group_list  one ``[m_i, n_i]`` per group
    2           one ``[m_i, k_i]`` per group       one ``[sum of m_i, n]``
    3           one ``[m, k]``, split by group_list  one ``[m, n]``
    ==========  =================================  =======================================

    Args:
        x: at most 64 tensors, fp16, bf16 or fp32.
        weight: ``[k_i, n_i]`` per group, dtype of x.
        hcomm: the group, its name, or the name of its HCCL communicator.
        bias: ``[n_i]`` per group; it is inside the sum over ranks: pass it on one rank, or
            bias / W on each of W.
        group_list: where the rows of each group end in x (the last is m), for split_item 1 and 3.
        reduce_op: "sum".
        comm_turn: 0.

    Returns:
        A list of tensors; those of one call share memory.

    Raises:
        OperatorError: lengths, shapes, dtypes or options that do not fit; a gradient is required.
    """
    _check.choice((0, 1, 2, 3), split_item=split_item)
    _check.choice(("sum",), reduce_op=reduce_op)
    _check.choice((0,), comm_turn=comm_turn)
    count = len(weight)
    _check.require(1 <= count <= MOST_GROUPS, "weight", f"1 to {MOST_GROUPS} tensors", count)
    if split_item in (1, 3):
        rows = _split(x, group_list, count)
    else:
        _check.require(
            group_list is None, "group_list", f"None with split_item {split_item}", group_list
        )
        _check.require(len(x) == count, "x", f"{count} tensors, one per weight", len(x))
        rows = list(x)
    _check.require(
        bias is None or len(bias) == count, "bias", f"{count} tensors, one per weight",
        bias if bias is None else len(bias),
    )  # fmt: skip
    for i, (a, b) in enumerate(zip(rows, weight, strict=True)):
        _check_product(i, a, b, None if bias is None else bias[i], rows[0])
    widths = [b.size(1) for b in weight]
    if split_item in (2, 3):
        same = len(set(widths)) == 1
        _check.require(same, "weight", f"one n, for one output of split_item {split_item}", widths)
    name = group_name(_check, hcomm=hcomm)
    flat = GROUPED_MAT_MUL_ALL_REDUCE(
        rows, list(weight), None if bias is None else list(bias), name
    )
    if split_item in (2, 3):
        return [flat.view(-1, widths[0])]
    return _views(flat, rows, weight)


def _split(x: Sequence[Tensor], group_list: Sequence[int] | None, count: int) -> list[Tensor]:
    _check.require(len(x) == 1, "x", "1 tensor with split_item 1 and 3", len(x))
    _check.rank(2, **{"x[0]": x[0]})
    expected = f"{count} row numbers, one per weight, for split_item 1 and 3"
    _check.require(group_list is not None and len(group_list) == count, "group_list", expected,
                   group_list)  # fmt: skip
    assert group_list is not None
    ends = [int(end) for end in group_list]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    _check.require(min(sizes) >= 0, "group_list", "numbers that do not decrease", ends)
    _check.require(ends[-1] == x[0].size(0), "group_list", f"{x[0].size(0)} rows in all", ends)
    return list(x[0].split(sizes))


def _check_product(i: int, a: Tensor, b: Tensor, bias: Tensor | None, first: Tensor) -> None:
    names = (f"x[{i}]", f"weight[{i}]", f"bias[{i}]")
    _check.rank(2, **{names[0]: a, names[1]: b})
    _check.dtype(FLOATS, **{names[0]: a})
    for what in ("dtype", "device"):
        _check.same(what, **{"x[0]": first, names[0]: a, names[1]: b, names[2]: bias})
    _check.require(a.size(1) == b.size(0), names[1], f"{a.size(1)} rows, as {names[0]} has columns",
                   tuple(b.shape))  # fmt: skip
    if bias is not None:
        _check.shape(b.shape[1:], **{names[2]: bias})
    _check.forward_only(**{names[0]: a, names[1]: b, names[2]: bias})


def _views(flat: Tensor, x: Sequence[Tensor], weight: Sequence[Tensor]) -> list[Tensor]:
    shapes = [(a.size(0), b.size(1)) for a, b in zip(x, weight, strict=True)]
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _reference(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str
) -> Tensor:
    flat = _fake(x, weight, bias, group)
    for i, out in enumerate(_views(flat, x, weight)):
        if bias is None:
            torch.mm(x[i], weight[i], out=out)
        else:
            torch.addmm(bias[i], x[i], weight[i], out=out)
    dist.all_reduce(flat, group=resolve(group))
    return flat


def _npu(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str) -> Tensor:
    if bias is not None and x[0].dtype == torch.bfloat16:
        bias = [one.float() for one in bias]  # the op adds an fp32 bias to bf16 products
    terms = torch.ops.npu.npu_grouped_matmul(x, weight, bias=bias, split_item=0, group_type=-1)
    flat = torch.cat([term.flatten() for term in terms])
    dist.all_reduce(flat, group=resolve(group))
    return flat


def _fake(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str) -> Tensor:
    return x[0].new_empty(sum(a.size(0) * b.size(1) for a, b in zip(x, weight, strict=True)))


def _flops(
    x: list[tuple[int, ...]], weight: list[tuple[int, ...]], *_: object, **__: object
) -> int:
    return sum(2 * m * k * n for (m, k), (_k, n) in zip(x, weight, strict=True))


GROUPED_MAT_MUL_ALL_REDUCE = Operator(
    "grouped_mat_mul_all_reduce(Tensor[] x, Tensor[] weight, Tensor[]? bias, str group) -> Tensor",
    reference=_reference,
    fake=_fake,
    npu=[torch_npu(_npu, "npu_grouped_matmul")],
    flops=_flops,
    samples=lambda dtype: (),  # without a group there is nothing to run
    public="mindspeed.ops.npu_grouped_mat_mul_all_reduce.npu_grouped_mat_mul_all_reduce",
)
