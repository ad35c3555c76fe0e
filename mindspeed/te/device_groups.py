"""Products of grouped experts whose sizes stay on the device.

    sizes = DeviceSizes(ends)                      # in the place of the sizes of each expert
    y = matmul(x, weights, sizes, True)            # or the sizes on the host, as a list

The rows of expert i end before row ``ends[i]``; those after the last end are nobody's: buffers are
as long as a bound. A grouped product leaves garbage there, in its result and in the gradient of its
input, so both are set to zero (never multiplied by it), and the gradients of weights do not read
them. An end behind the last row would be accepted in silence: :meth:`DeviceSizes.of` stops there.

The host reads nothing. Weights that do not lie side by side are copied for each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mindspeed.te import kernels


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes of groups of rows, as Megatron's experts and linear layers hand them on.

    Attributes:
        ends: int64 ``[groups]`` on the device of the rows, not decreasing.
    """

    ends: Tensor

    @classmethod
    def of(cls, sizes: Tensor, rows: int) -> DeviceSizes:
        """Make it of int64 ``sizes [groups]`` of groups in ``rows`` rows."""
        return cls(sizes.cumsum(0).clamp(max=rows))

    def tolist(self) -> DeviceSizes:
        """Stay: Megatron's experts ask for numbers of the host."""
        return self

    def __len__(self) -> int:
        return int(self.ends.shape[0])

    def among(self, before: int, after: int) -> DeviceSizes:
        """Sizes of these groups among others, ``before`` and ``after`` them, without rows."""
        none, last = self.ends.new_zeros(before), self.ends[-1:].expand(after)
        return DeviceSizes(torch.cat([none, self.ends, last]))

    def cleared(self, rows: Tensor) -> Tensor:
        """``rows [m, ...]`` with zeros where no group is."""
        valid = torch.arange(rows.shape[0], device=rows.device) < self.ends[-1]
        return torch.where(
            valid.unsqueeze(1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device)
        )


Splits = Sequence[int] | DeviceSizes


def matmul(x: Tensor, weights: Sequence[Tensor], splits: Splits, transposed: bool) -> Tensor:
    """See :func:`mindspeed.te.kernels.grouped_matmul`: ``[tokens, k]`` to ``[tokens, n]``."""
    if not isinstance(splits, DeviceSizes):
        return kernels.grouped_matmul(x, weights, splits, transposed)
    from mindspeed.ops.grouped_matmul import GROUPED_MATMUL, product_by_torch

    stacked = _stacked(weights)
    matrices = stacked.transpose(1, 2) if transposed else stacked
    product = GROUPED_MATMUL if _without_values(x) else product_by_torch
    return splits.cleared(product(x, matrices, None, splits.ends))


def wgrad(left: Tensor, right: Tensor, splits: Splits) -> Tensor:
    """See :func:`mindspeed.te.kernels.grouped_wgrad`: ``[groups, m, n]``."""
    if not isinstance(splits, DeviceSizes):
        return kernels.grouped_wgrad(left, right, splits)
    from mindspeed.ops.grouped_matmul import GROUPED_OUTER, outer_by_torch

    product = GROUPED_OUTER if _without_values(left) else outer_by_torch
    return product(left, right, splits.ends)  # type: ignore[no-any-return]


def accumulate_wgrad(
    left: Tensor, right: Tensor, splits: Splits, main_grads: Sequence[Tensor]
) -> None:
    """See :func:`mindspeed.te.kernels.accumulate_grouped_wgrad`: ``main_grads [m, n]``."""
    if not isinstance(splits, DeviceSizes):
        kernels.accumulate_grouped_wgrad(left, right, splits, main_grads)
        return
    for main_grad, product in zip(main_grads, wgrad(left, right, splits).unbind(0), strict=True):
        main_grad.add_(product)


def _without_values(x: Tensor) -> bool:
    """Whether a step is only planned, in another dtype than bf16: torch knows no shapes then."""
    return (x.is_meta or isinstance(x, FakeTensor)) and x.dtype != torch.bfloat16


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """One tensor ``[groups, ...]``: a view of weights that lie side by side, or a copy."""
    first = weights[0]
    size, start = first.numel(), first.storage_offset()
    adjacent = all(
        one.untyped_storage()._cdata == first.untyped_storage()._cdata
        and one.storage_offset() == start + i * size
        and one.is_contiguous()
        for i, one in enumerate(weights)
    )
    if not adjacent:
        return torch.stack(list(weights))
    return first.as_strided((len(weights), *first.shape), (size, *first.stride()))
