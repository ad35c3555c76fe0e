"""Matrix products with the collective of a tensor-parallel linear, into given tensors.

    from mindspeed.ops.compat.lcal_functional import coc_ops
    coc_ops.matmul_reduce_scatter(x, weight.t(), output)           # Megatron's group, one chunk

    four = CocOps(group, chunks=4)                                  # any group, overlapped
    four.all_gather_matmul(x, weight.t(), output)

=======================  =======================================  ==============  ==============
method                   result                                   input1          output
=======================  =======================================  ==============  ==============
pure_matmul              ``input1 @ input2``                      ``[m, k]``      ``[m, n]``
matmul_all_reduce        ``sum over ranks of input1 @ input2``    ``[m, k]``      ``[m, n]``
matmul_all_reduce_w8a16  the same of int8 weights, dequantised    ``[m, k]``      ``[m, n]``
matmul_reduce_scatter    this rank's rows of that sum             ``[m, k]``      ``[m / p, n]``
all_gather_matmul        ``(input1 of all ranks) @ input2``       ``[m / p, k]``  ``[m, n]``
all_gather_matmul_v2     the same, and the rows of all ranks      ``[m / p, k]``  ``[m, n]``
=======================  =======================================  ==============  ==============

The bias, ``[1, n]`` or ``[n]``, is added once, after the communication. On every device the
collectives of one chunk of rows overlap with the product of the next
(:mod:`~mindspeed.ops.overlap`); fused kernels of torch_npu, and of torch for GPUs that share
memory, go before that where they fit.
Source: the operators that the original library calls LCAL, here for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops import overlap
from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops._numerics import product_flops
from mindspeed.ops.compat.mm_all_reduce import MM_ALL_REDUCE, check_weight_int8
from mindspeed.ops.fused_collectives import NPU, SYMMETRIC_MEMORY
from mindspeed.ops.process_groups import group_name, resolve, tensor_parallel
from mindspeed.ops.registry import Kernel, Operator

__all__ = ["CocOps", "coc_ops"]


@dataclass(frozen=True)
class CocOps:
    """The operators for one group and one number of chunks.

    ``input2`` is ``[k, n]``, also as a transposed view, or ``[n, k]``; a square one is taken as it
    is. All tensors have one dtype (fp16, bf16 or fp32), ``output`` is contiguous, nothing needs a
    gradient, and the methods return None.

    Attributes:
        group: a group or its name; None for Megatron's tensor-parallel group.
        chunks: parts of the rows that are computed and sent in turn; it divides a rank's rows.
    """

    group: dist.ProcessGroup | str | None = None
    chunks: int = 1

    def pure_matmul(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None
    ) -> None:
        """``output [m, n] = input1 @ input2 + bias``, without communication."""
        b = _operands(ArgumentCheck("coc_ops.pure_matmul"), input1, input2, output, bias, 1)
        torch.mm(input1, b, out=output)
        _add(output, bias)

    def matmul_all_reduce(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None
    ) -> None:
        """``output [m, n] = sum over ranks of input1 @ input2, + bias``."""
        check = ArgumentCheck("coc_ops.matmul_all_reduce")
        name = self._group(check)
        b = _operands(check, input1, input2, output, bias, 1)
        self._check_chunks(check, input1.size(0))
        MATMUL_ALL_REDUCE(input1.contiguous(), b, output, self.chunks, name)
        _add(output, bias)

    def matmul_all_reduce_w8a16(
        self,
        input1: Tensor,
        input2: Tensor,
        output: Tensor,
        scale: Tensor,
        offset: Tensor | None = None,
        group_size: int = 0,
        bias: Tensor | None = None,
    ) -> None:
        """``output = sum over ranks of input1 @ ((input2 + offset) * scale), + bias``.

        Args:
            input1: ``[m, k]``, fp16, bf16 or fp32.
            input2: ``[k, n]`` int8, this rank's rows of the weight.
            output: ``[m, n]``, dtype of input1; overwritten.
            scale: ``[1]``, ``[n]``, ``[1, n]`` or ``[ceil(k / group_size), n]``, dtype of input1.
            offset: shape and dtype of scale, or None.
            group_size: rows of input2 that share a scale, a multiple of 32 below k; 0 for all.
            bias: ``[1, n]`` or ``[n]``, dtype of input1, or None; added once.
        """
        check = ArgumentCheck("coc_ops.matmul_all_reduce_w8a16")
        name = self._group(check)
        check.require(self.chunks == 1, "chunks", "1: its collective is not divided", self.chunks)
        check.rank(2, input1=input1, input2=input2)
        n = input2.size(1)
        check.shape((input1.size(1), n), input2=input2)
        check_weight_int8(check, input1, input2, scale, offset, group_size)
        check.same("device", input1=input1, input2=input2, scale=scale, offset=offset)
        _check_output(check, input1, output, bias, n)
        check.forward_only(scale=scale, offset=offset)
        output.copy_(
            MM_ALL_REDUCE(input1.contiguous(), input2, None, scale, offset, None, group_size, name)
        )
        _add(output, bias)

    def matmul_reduce_scatter(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None
    ) -> None:
        """``output [m / p, n]``: this rank's rows of the sum of ``input1 @ input2``, + bias."""
        check = ArgumentCheck("coc_ops.matmul_reduce_scatter")
        name = self._group(check)
        ranks = resolve(name).size()
        expected = f"a number of rows that {ranks} ranks divide"
        check.require(input1.dim() != 2 or input1.size(0) % ranks == 0, "input1", expected, input1)
        b = _operands(check, input1, input2, output, bias, 1 / ranks)
        self._check_chunks(check, output.size(0))
        MATMUL_REDUCE_SCATTER(input1.contiguous(), b, output, self.chunks, name)
        _add(output, bias)

    def all_gather_matmul(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None
    ) -> None:
        """``output [m, n] = (input1 of all ranks) @ input2 + bias``."""
        self._all_gather(
            ArgumentCheck("coc_ops.all_gather_matmul"), input1, input2, output, None, bias
        )

    def all_gather_matmul_v2(
        self,
        input1: Tensor,
        input2: Tensor,
        output: Tensor,
        comm_output: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """The same, and ``comm_output = input1 of all ranks``, ``[m, k]``, dtype of input1."""
        self._all_gather(
            ArgumentCheck("coc_ops.all_gather_matmul_v2"), input1, input2, output, comm_output, bias
        )

    def _all_gather(
        self,
        check: ArgumentCheck,
        input1: Tensor,
        input2: Tensor,
        output: Tensor,
        comm_output: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        name = self._group(check)
        ranks = resolve(name).size()
        b = _operands(check, input1, input2, output, bias, ranks)
        self._check_chunks(check, input1.size(0))
        if comm_output is None:
            ALL_GATHER_MATMUL(input1.contiguous(), b, output, self.chunks, name)
        else:
            check.floating(input1=input1, comm_output=comm_output)
            check.shape((input1.size(0) * ranks, input1.size(1)), comm_output=comm_output)
            contiguous = comm_output.is_contiguous()
            check.require(contiguous, "comm_output", "a contiguous tensor", comm_output)
            ALL_GATHER_MATMUL_V2(input1.contiguous(), b, output, comm_output, self.chunks, name)
        _add(output, bias)

    def _group(self, check: ArgumentCheck) -> str:
        group = tensor_parallel() if self.group is None else self.group
        if group is None:
            remedy = "one in CocOps(group), or Megatron's tensor-parallel group initialised"
            check.fail("group", remedy, None)
        return group_name(check, group=group)

    def _check_chunks(self, check: ArgumentCheck, rows: int) -> None:
        fits = isinstance(self.chunks, int) and self.chunks >= 1 and rows % self.chunks == 0
        expected = f"a number of chunks that divides the {rows} rows of a rank"
        check.require(fits, "chunks", expected, self.chunks)


coc_ops = CocOps()
"""The operators over Megatron's tensor-parallel group, in one chunk."""


def _operands(
    check: ArgumentCheck,
    input1: Tensor,
    input2: Tensor,
    output: Tensor,
    bias: Tensor | None,
    growth: float,
) -> Tensor:
    """Check the tensors and return input2 as ``[k, n]``; ``growth``: rows of output / of input1."""
    check.floating(input1=input1, input2=input2)
    check.rank(2, input1=input1, input2=input2, output=output)
    k, n = input1.size(1), output.size(1)
    expected = f"shape {(k, n)} or {(n, k)}, from the columns of input1 and output"
    check.require(tuple(input2.shape) in ((k, n), (n, k)), "input2", expected, tuple(input2.shape))
    _check_output(check, input1, output, bias, n, growth)
    check.forward_only(input2=input2)
    return input2 if tuple(input2.shape) == (k, n) else input2.t()


def _check_output(
    check: ArgumentCheck,
    input1: Tensor,
    output: Tensor,
    bias: Tensor | None,
    n: int,
    growth: float = 1,
) -> None:
    check.floating(input1=input1, output=output, bias=bias)
    check.shape((round(input1.size(0) * growth), n), output=output)
    check.require(output.is_contiguous(), "output", "a contiguous tensor", output)
    if bias is not None:
        fits = tuple(bias.shape) in ((n,), (1, n))
        check.require(fits, "bias", f"shape {(1, n)} or {(n,)}", tuple(bias.shape))
    check.forward_only(input1=input1, output=output, bias=bias)


def _add(output: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        output.add_(bias)


def _gathered_flops(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], output_shape: tuple[int, ...],
    *_: object, **__: object
) -> int:  # fmt: skip
    return product_flops((output_shape[0], a_shape[1]), b_shape)


def _define(name: str, reference: Kernel, gathers: bool = False, outputs: str = "") -> Operator:
    outputs = outputs or "Tensor(a!) output"
    return Operator(
        f"{name}(Tensor a, Tensor b, {outputs}, int chunks, str group) -> ()",
        reference=reference,
        fake=lambda *_: None,
        cuda=[kernel for kernel in (SYMMETRIC_MEMORY.get(name),) if kernel],
        npu=[NPU[name]],
        flops=_gathered_flops if gathers else product_flops,
        samples=lambda dtype: (),  # without a group there is nothing to run
        public=f"mindspeed.ops.lcal_functional.coc_ops.{name.removeprefix('coc_')}",
    )


MATMUL_ALL_REDUCE = _define(
    "coc_matmul_all_reduce",
    lambda a, b, out, chunks, group: overlap.matmul_all_reduce(a, b, out, resolve(group), chunks),
)
MATMUL_REDUCE_SCATTER = _define(
    "coc_matmul_reduce_scatter",
    lambda a, b, out, chunks, group: overlap.matmul_reduce_scatter(
        a, b, out, resolve(group), chunks
    ),
)
ALL_GATHER_MATMUL = _define(
    "coc_all_gather_matmul",
    lambda a, b, out, chunks, group: overlap.all_gather_matmul(
        a, b, out, None, resolve(group), chunks
    ),
    gathers=True,
)
ALL_GATHER_MATMUL_V2 = _define(
    "coc_all_gather_matmul_v2",
    lambda a, b, out, rows, chunks, group: overlap.all_gather_matmul(
        a, b, out, rows, resolve(group), chunks
    ),
    gathers=True,
    outputs="Tensor(a!) output, Tensor(b!) comm_output",
)
