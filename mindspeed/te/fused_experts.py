"""Products of grouped experts and gradients added to ``main_grad``, by as few launches as may be.

One launch serves all experts of a rank whose weights are adjacent in memory: as
:class:`mindspeed.te.grouped.GroupedLinear` and Megatron's ``GroupedMLP`` allocate them, and in
reverse order in Megatron's buffers:

    registered   weight0 weight1 weight2 weight3
    in memory    weight3 weight2 weight1 | gap | weight0        Megatron's gradient buffers
    runs         [0]  [1 2 3, backwards]

Megatron's buffers (gradients always, parameters with the distributed optimizer) hold parameters in
reverse order, in buckets with gaps between them. A launch reads forwards only, so the rows of a
backwards run are copied in the order of memory, and its result back.

The buffers stay as they are: checkpoints of the distributed optimizer hold them as they lie
(``dp_reshardable``, Megatron's default), so another order would read others' states as its own.

Tokens are moved to experts and back by one operator in each direction. The host is not
synchronised, unless the number of rows is not given. Sums run in fp32 without a copy of the rows in
fp32. The row map is that of :func:`mindspeed.ops.moe_permutation.map_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mindspeed.ops.grouped_matmul import GROUPED_MATMUL, GROUPED_OUTER
from mindspeed.ops.moe_permutation import MOE_PERMUTE, MOE_UNPERMUTE, chunk_rows, map_rows, pack
from mindspeed.ops.npu_groupmatmul_add import GROUPMATMUL_ADD
from mindspeed.ops.npu_matmul_add import MATMUL_ADD
from mindspeed.te.kernels import grouped_matmul as one_by_one


def accumulate_wgrad(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """See :func:`mindspeed.te.kernels.accumulate_wgrad`: ``main_grad [out, in]``."""
    MATMUL_ADD(x, grad, main_grad)


def grouped_matmul(
    x: Tensor, weights: Sequence[Tensor], splits: Sequence[int], transposed: bool
) -> Tensor:
    """See :func:`mindspeed.te.kernels.grouped_matmul`: ``[tokens, k]`` to ``[tokens, n]``."""
    outputs = []
    width = weights[0].shape[0 if transposed else 1]
    found = runs(weights, splits, x.shape[1] + width)
    for run, rows in zip(found, _rows(x, found, splits), strict=True):
        outputs.append(_product(rows, run, weights, splits[run.experts], transposed))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _product(
    x: Tensor, run: ExpertRun, weights: Sequence[Tensor], splits: Sequence[int], transposed: bool
) -> Tensor:
    if run.count == 1 and run.matrices is None:
        run = ExpertRun(run.first, 1, weights[run.first].unsqueeze(0))
    if run.matrices is None:
        return one_by_one(x, weights[run.experts], splits, transposed)
    matrices = run.matrices.transpose(1, 2) if transposed else run.matrices
    ends = _ends(run.sizes(splits), x)
    out = GROUPED_MATMUL(run.ordered(x, splits), matrices, None, ends)
    return run.restored(out, splits)


def _rows(x: Tensor, found: Sequence[ExpertRun], splits: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows ``[t, k]`` of each run."""
    return x.split([sum(splits[run.experts]) for run in found])


def grouped_wgrad(left: Tensor, right: Tensor, splits: Sequence[int]) -> Tensor:
    """See :func:`mindspeed.te.kernels.grouped_wgrad`: ``[groups, m, n]`` in its dtype."""
    return GROUPED_OUTER(left, right, _ends(splits, left))  # type: ignore[no-any-return]


def accumulate_grouped_wgrad(
    left: Tensor, right: Tensor, splits: Sequence[int], main_grads: Sequence[Tensor]
) -> None:
    """See :func:`mindspeed.te.kernels.accumulate_grouped_wgrad`: ``main_grads [m, n]``."""
    found = runs(main_grads, splits, left.shape[1] + right.shape[1])
    lefts, rights = _rows(left, found, splits), _rows(right, found, splits)
    for run, a, b in zip(found, lefts, rights, strict=True):
        sizes = list(splits[run.experts])
        if run.matrices is not None:
            ends = _ends(run.sizes(sizes), a)
            GROUPMATMUL_ADD(run.ordered(a, sizes), run.ordered(b, sizes), ends, run.matrices)
            continue
        parts = zip(a.split(sizes), b.split(sizes), main_grads[run.experts], strict=True)
        for one, other, main_grad in parts:
            MATMUL_ADD(other, one, main_grad)


def _ends(splits: Sequence[int], x: Tensor) -> Tensor:
    return torch.tensor(list(accumulate(splits)), dtype=torch.int64).to(x.device, non_blocking=True)


COPIED = 4
"""Rows are copied where that moves at most a fourth of the bytes of the matrices."""


@dataclass(frozen=True)
class ExpertRun:
    """Experts ``first`` to ``first + count - 1``.

    Attributes:
        matrices: ``[count, ...]``, a view in the order of memory; None: one launch for each.
        backwards: that order is the reverse of the experts'.
    """

    first: int
    count: int
    matrices: Tensor | None = None
    backwards: bool = False

    @property
    def experts(self) -> slice:
        """Runs of a sequence by expert."""
        return slice(self.first, self.first + self.count)

    def ordered(self, rows: Tensor, splits: Sequence[int]) -> Tensor:
        """The run's ``rows [m, ...]`` of ``splits`` in the order of memory."""
        return torch.cat(rows.split(list(splits))[::-1]) if self.backwards else rows

    def restored(self, rows: Tensor, splits: Sequence[int]) -> Tensor:
        """The inverse of :meth:`ordered`: ``rows [m, ...]`` by expert, as ``splits``."""
        return torch.cat(rows.split(list(splits)[::-1])[::-1]) if self.backwards else rows

    def sizes(self, splits: Sequence[int]) -> list[int]:
        """``splits`` by expert in the order of memory."""
        return list(splits)[::-1] if self.backwards else list(splits)


def runs(tensors: Sequence[Tensor], splits: Sequence[int], columns: int) -> list[ExpertRun]:
    """Divide experts so that few launches serve all.

    Args:
        tensors: One matrix ``[m, n]`` per expert, all of one dtype.
        columns: Elements of a row that a backwards run copies, input and output together.
    """
    found: list[ExpertRun] = []
    for first, count, step in _lines(tensors):
        run = ExpertRun(first, count)
        if count > 1:
            rows = sum(splits[first : first + count])
            matrices = sum(tensors[i].numel() for i in range(first, first + count))
            # Copying reads and writes.
            if step > 0 or 2 * rows * columns * COPIED <= matrices:
                start = tensors[first if step > 0 else first + count - 1]
                stacked = start.as_strided((count, *start.shape), (abs(step), *start.stride()))
                run = ExpertRun(first, count, stacked, step < 0)
        if found and run.matrices is None and found[-1].matrices is None:
            run = ExpertRun(found[-1].first, found[-1].count + count)
            found.pop()
        found.append(run)
    return found


def _lines(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """Maximal lines of matrices without gaps: first, count and the step between them."""
    first = 0
    while first < len(tensors):
        count, step = 1, 0
        for i in range(first + 1, len(tensors)):
            found = _step(tensors[i - 1], tensors[i])
            if not found or (step and found != step):
                break
            count, step = count + 1, found
        yield first, count, step
        first += count


def _step(a: Tensor, b: Tensor) -> int:
    """Elements from ``a`` to ``b`` if these lie side by side, both contiguous; else 0."""
    if (
        a.shape != b.shape
        or a.dtype != b.dtype
        or a.untyped_storage()._cdata != b.untyped_storage()._cdata
        or not (a.is_contiguous() and b.is_contiguous())
    ):
        return 0
    step = int(b.storage_offset() - a.storage_offset())
    return step if abs(step) == a.numel() else 0


def permute(
    tokens: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See :func:`mindspeed.te.kernels.moe_permute`; the row map is int32 ``[2, t, e]``."""
    row_id_map = map_rows(routing_map)
    rows = -1 if num_out_tokens is None else int(num_out_tokens)
    if rows < 0:
        rows = int(routing_map.sum())
    permuted = MOE_PERMUTE(tokens, row_id_map[0], rows, True)
    if probs is not None:
        one_each = row_id_map[1].reshape(-1, 1)
        probs = MOE_PERMUTE(probs.reshape(-1, 1), one_each, rows, True).squeeze(1)
    return permuted, probs, row_id_map


def permute_again(tokens: Tensor, row_id_map: Tensor, rows: int) -> Tensor:
    """See :func:`mindspeed.te.kernels.moe_permute_again`; the row map is int32 ``[2, t, e]``."""
    return MOE_PERMUTE(tokens, row_id_map[0], rows, True)  # type: ignore[no-any-return]


def unpermute(
    permuted: Tensor, row_id_map: Tensor, merging_probs: Tensor | None, restore_shape: Sequence[int]
) -> Tensor:
    """See :func:`mindspeed.te.kernels.moe_unpermute`; ``restore_shape`` is not read: ``[t, h]``."""
    packed, by_expert = row_id_map
    weights = None if merging_probs is None else pack(merging_probs, by_expert, 0.0)
    return MOE_UNPERMUTE(permuted, packed, weights, True)  # type: ignore[no-any-return]


def sort_chunks(tensors: Sequence[Tensor], sizes: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """See :func:`mindspeed.te.kernels.moe_sort_chunks`; ``[rows, ...]`` of floating dtypes."""
    device, count = tensors[0].device, tensors[0].shape[0]
    # The host does not wait for the device.
    rows = chunk_rows(
        sizes.to(device, non_blocking=True), order.to(device, non_blocking=True), count
    )
    return tuple(
        # Not reshape(count, -1): without rows the size of a row would be ambiguous.
        MOE_PERMUTE(x.unsqueeze(-1).flatten(1), rows, count, False).view(x.shape)
        for x in tensors
    )
