"""The three products with a collective of :mod:`mindspeed.te.kernels`, overlapped.

    products = OverlappedProducts(Overlap(parts=4), plain)
    seams.use_kernels(owner="coc", **products.kernels())

A product of shape m, k, n over p ranks moves, whatever the strategy, the bytes of its collective;
in n parts it issues n collectives:

    gather_matmul    all-gathers m k elements          forward of a column layer with sequence
                                                       parallelism, dx of a row layer with it
    matmul_scatter   reduce-scatters m n elements      the other way round
    matmul_reduce    all-reduces m n elements          forward of a row layer without it, dx of a
                                                       column layer without it

dx of a column layer is plain where a weight gradient follows, which hides its collective already.

The matrix unit of an NPU is fastest where rows in memory begin at multiples of 512 bytes
(``matmul_soc_friendly``): a transposed layout of the right matrix, or zeros that lengthen the inner
dimension, change no result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.errors import TrainingError
from mindspeed.ops import fused_collectives, overlap
from mindspeed.tensor_parallel.strategy import Operation, Overlap, Product, ProductStrategy, choose

logger = logging.getLogger("mindspeed")

_OPERATORS: dict[Operation, str] = {
    "gather_matmul": "coc_all_gather_matmul_v2",
    "matmul_scatter": "coc_matmul_reduce_scatter",
    "matmul_reduce": "coc_matmul_all_reduce",
}


def why_not_fused(operation: Operation, rows: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """The reason why no fused kernel computes a product, or None.

    Args:
        operation: of :mod:`mindspeed.te.kernels`.
        rows: left operand, ``[m, k]``.
        group: tensor-parallel ranks.
    """
    return fused_collectives.why_not_fused(_OPERATORS[operation], rows, group)


class OverlappedProducts:
    """The products of a process, with what was chosen for each shape so far.

    Args:
        overlap: what the user chose.
        plain: the functions of :mod:`mindspeed.te.kernels` that these replace, by name.
    """

    def __init__(self, overlap: Overlap, plain: Mapping[str, Callable[..., Any]]) -> None:
        self._plain = plain
        self._said: set[tuple[str, str]] = set()
        self.use(overlap)

    def use(self, overlap: Overlap) -> None:
        """Choose strategies anew."""
        self._overlap = overlap
        self._chosen: dict[tuple[Any, ...], ProductStrategy] = {}

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The functions by their names in :mod:`mindspeed.te.kernels`."""
        return {name: getattr(self, name) for name in self._plain}

    def gather_matmul(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool = True,
        bias: torch.Tensor | None = None,
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :func:`mindspeed.te.kernels.gather_matmul`: ``[s/p, b, k]`` to ``[s, b, n]``."""
        a, b = _rows(x), _right(weight, transposed)
        product = _product("gather_matmul", a.shape[0] * group.size(), b, group)
        strategy = self._choose(product, a, group)
        if strategy.kind == "plain":
            return self._plain["gather_matmul"](  # type: ignore[no-any-return]
                x, weight, group, transposed=transposed, bias=bias, keep=keep
            )
        shape = (x.shape[0] * group.size(), *x.shape[1:-1], -1)
        if strategy.kind == "fused":
            mode = self._overlap.comm_mode
            out, gathered = fused_collectives.all_gather_matmul(a, b, group, keep, mode)
            out = out if bias is None else out.add_(bias)
        else:
            out = a.new_empty(product.m, product.n)
            gathered = a.new_empty(product.m, product.k) if keep else None
            b = self._aligned(product, strategy, b)
            overlap.all_gather_matmul(a, b, out, gathered, group, strategy.parts, bias)
        return out.view(shape), None if gathered is None else gathered.view(shape)

    def matmul_scatter(self, *operands: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        """See :func:`mindspeed.te.kernels.matmul_scatter`: ``[s, b, k]`` to ``[s/p, b, n]``."""
        return self._summed("matmul_scatter", *operands, **options)

    def matmul_reduce(self, *operands: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        """See :func:`mindspeed.te.kernels.matmul_reduce`: ``[s, b, k]`` to ``[s, b, n]``."""
        return self._summed("matmul_reduce", *operands, **options)

    def _summed(
        self,
        name: Operation,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool = True,
        addend: torch.Tensor | None = None,
        async_op: bool = False,
        wgrad_follows: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        a, b = _rows(x), _right(weight, transposed)
        product, scatters = _product(name, a.shape[0], b, group), name == "matmul_scatter"
        chosen = self._is_chosen(async_op, wgrad_follows)
        strategy = self._choose(product, a, group, chosen, addend is not None)
        if strategy.kind == "plain" or (scatters and x.shape[0] % group.size()):  # plain refuses
            return self._plain[name](  # type: ignore[no-any-return]
                x, weight, group, transposed=transposed, addend=addend, async_op=async_op
            )
        if strategy.kind == "fused":
            fused = fused_collectives
            collective = fused.matmul_reduce_scatter if scatters else fused.matmul_all_reduce
            out = collective(a, b, group, self._overlap.comm_mode)
        else:
            b, added = self._aligned(product, strategy, b), _optional_rows(addend)
            in_parts = overlap.matmul_reduce_scatter if scatters else overlap.matmul_all_reduce
            out = a.new_empty(product.rows, product.n) if scatters or added is None else added
            in_parts(a, b, out, group, strategy.parts, added)
        rows = x.shape[0] // group.size() if scatters else x.shape[0]
        return out.view(rows, *x.shape[1:-1], -1), None

    def _is_chosen(self, column_backward: bool, wgrad_follows: bool) -> bool:
        """Whether a reduction may be overlapped: of a column layer's backward, which is the one
        that waits later, or of a row layer's forward.
        """
        if not column_backward:
            return self._overlap.row_forward
        return self._overlap.column_backward or not wgrad_follows

    def _choose(
        self,
        product: Product,
        a: torch.Tensor,
        group: dist.ProcessGroup,
        chosen: bool = True,
        has_addend: bool = False,
    ) -> ProductStrategy:
        if not chosen:
            return ProductStrategy("plain")
        key = (product, a.dtype, a.device.type, id(group), has_addend)
        if key not in self._chosen:
            unfit = "a correction is added before the reduction (LoRA)" if has_addend else None
            if self._overlap.fused and unfit is None:
                unfit = why_not_fused(product.operation, a, group)
            self._chosen[key] = choose(self._overlap, product, unfit)
            self._say(product, self._chosen[key])
        return self._chosen[key]

    def _say(self, product: Product, strategy: ProductStrategy) -> None:
        """Print the reason of a fallback once, or raise it."""
        reason = strategy.reason
        if not reason:
            return
        if self._overlap.fused and product.shape not in self._overlap.parts_of:
            what = f"{product} does not run in one fused kernel: {reason}"
            if self._overlap.strict:
                raise TrainingError(f"{what} (MINDSPEED_STRICT_FUSION=1 makes this an error)")
        else:
            what, reason = f"{product} runs in other parts: {reason}", "rows"
        if (product.operation, reason) in self._said:
            return
        self._said.add((product.operation, reason))
        if dist.get_rank() == 0:
            count = f"in {strategy.parts} parts" if strategy.parts > 1 else "in one piece"
            logger.warning("%s; it runs %s (said once)", what, count)

    def _aligned(
        self, product: Product, strategy: ProductStrategy, b: torch.Tensor
    ) -> torch.Tensor:
        if not self._overlap.aligned or b.device.type != "npu":
            return b
        rows = product.m // strategy.parts
        return aligned_right(rows, b, k_min=self._overlap.k_min, k_max=self._overlap.k_max)


def _product(operation: Operation, m: int, b: torch.Tensor, group: dist.ProcessGroup) -> Product:
    return Product(operation, m, b.shape[0], b.shape[1], group.size())


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _optional_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.view(-1, x.shape[-1])


def _right(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The matrix ``[k, n]``."""
    weight = weight.detach()
    return weight.t() if transposed else weight


_BLOCK, _UNIT = 512, 32  # bytes: of a memory access, of the smallest alignment


def aligned_right(
    rows: int, b: torch.Tensor, *, k_min: int = 1024, k_max: int = 4096
) -> torch.Tensor:
    """The right matrix of ``[rows, k] x [k, n]``, laid out or padded.

    Args:
        rows: of one product, that is of one part.
        b: ``[k, n]``, any dtype and strides.
        k_min: no shorter k is padded: the copies cost more than they gain.
        k_max: nor a longer one.

    Returns:
        ``[k, n]``, or ``[k', n]`` with zeros at the end of k; ``mindspeed.ops.overlap`` pads the
        left matrix to match.
    """
    k, n = b.shape
    block, unit = _BLOCK // b.element_size(), _UNIT // b.element_size()
    outer = rows % block == 0 and n % block == 0
    if k % block == 0:
        return b if outer else b.t().contiguous().t()
    if k % unit and outer and k_min <= k <= k_max:
        return F.pad(b, (0, 0, 0, -k % block))
    return b
