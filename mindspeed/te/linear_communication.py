"""Gather, multiply, scatter: what a linear layer computes over tensor-parallel ranks.

``y = x W^T + b`` with W ``[out, in]`` sharded over p ranks. Layout ``[s, b, h]``; with sequence
parallelism (SP) activations outside the layer are sharded along s.

    ============ ================ ============================== =================================
    layer        forward          x -> y                         backward: dy -> dx
    ============ ================ ============================== =================================
    column, SP   gather_matmul    [s/p, b, in] -> [s, b, out/p]  matmul_scatter, and gathers x
    column       matmul           [s, b, in] -> [s, b, out/p]    matmul_reduce
    row, SP      matmul_scatter   [s, b, in/p] -> [s/p, b, out]  gather_matmul
    row          matmul_reduce    [s, b, in/p] -> [s, b, out]    matmul
    none         matmul           [s, b, in] -> [s, b, out]      matmul
    ============ ================ ============================== =================================

The products are looked up in :mod:`mindspeed.te.kernels`, where a feature may replace them; every
linear layer of this library communicates through them, in the autograd functions of
:mod:`mindspeed.te.linear_function` and of LoRA.

Where recomputation runs a layer twice, :mod:`mindspeed.tensor_parallel.regions` says what the
second run does without: the product of a layer whose output nothing reads, gathers of backward.
Collectives that a program waits for are left to it: :mod:`mindspeed.tensor_parallel.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mindspeed.spmd import Communication
from mindspeed.te import comm, kernels
from mindspeed.tensor_parallel import exchange, regions
from mindspeed.tensor_parallel.exchange import PartExchange

Work = Any
"""Handle of a collective that is under way; None where there is nothing to wait for."""
Gathered = tuple[Tensor, Work]
"""Result of a gather that is under way, complete after ``wait()``."""


@dataclass(frozen=True)
class LinearCommunication:
    """How a linear layer is sharded, hence what it communicates.

    Attributes:
        group: The tensor-parallel ranks; None for one rank.
        parallel_mode: ``"column"`` (W sharded along out), ``"row"`` (along in) or None.
        sequence_parallel: Activations outside the layer are sharded along s.
        overlap: A feature may overlap a product with its collective; False: the plain formulas,
            whatever it put in their place.
        output_unread: Nothing reads the output of this call: neither product nor collective runs.
        exchange: Takes the collectives that this call need not wait for.
    """

    group: Any = None
    parallel_mode: str | None = None
    sequence_parallel: bool = False
    overlap: bool = True
    output_unread: bool = False
    exchange: PartExchange | None = field(default_factory=exchange.current, compare=False)

    @property
    def column(self) -> bool:
        """A column-parallel layer of more than one rank."""
        return self.parallel_mode == "column" and comm.group_size(self.group) > 1

    @property
    def row(self) -> bool:
        """A row-parallel layer of more than one rank."""
        return self.parallel_mode == "row" and comm.group_size(self.group) > 1

    @property
    def gathers_input(self) -> bool:
        """The forward pass all-gathers x along s."""
        return self.column and self.sequence_parallel

    @property
    def gathers_grad(self) -> bool:
        """The backward pass all-gathers dy along s."""
        return self.row and self.sequence_parallel

    def typed(self) -> Communication:
        """The communication as a rule for :mod:`mindspeed.spmd`."""
        split = self.sequence_parallel
        return Communication(
            self.group if self.parallel_mode else None,
            gathers=self.column and split,
            sums_gradient=self.column and not split,
            reduces=self.row,
            scatters=split,
        )

    def kernel(self, name: str) -> Callable[..., Any]:
        """The product with a collective that the layer calls, by its name in ``te.kernels``."""
        return getattr(kernels, name) if self.overlap else _PLAIN[name]  # type: ignore[no-any-return]


_PLAIN: dict[str, Callable[..., Any]] = {
    name: getattr(kernels, name) for name in ("gather_matmul", "matmul_scatter", "matmul_reduce")
}
"""The formulas; imported before a feature can replace one."""


def overlaps_communication() -> bool:
    """Whether a feature has replaced the products with a collective."""
    return any(getattr(kernels, name) is not plain for name, plain in _PLAIN.items())


def multiply(
    x: Tensor,
    weight: Tensor,
    communication: LinearCommunication,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward pass: ``y = x W^T + bias`` with the collective of the layer.

    Args:
        x: ``[s, b, in]``, a shard of it as the layer requires.
        weight: W of this rank, ``[out, in]``.
        bias: ``[out]``; added once, after a reduction.
        addend: ``[s, b, out]``, added to the term of this rank before a reduction; overwritten.
        keep: Return the gathered x, too.

    Returns:
        y in the dtype of x, and the gathered ``[s, b, in]`` of a layer that gathers (else None). An
        unread y is zero and has no memory of its own.
    """
    group, gathered = communication.group, None
    if communication.output_unread:
        return _unread(x, weight, communication), None
    if communication.gathers_input:
        out, gathered = _gather_multiply(x, weight, communication, bias, keep)
    elif communication.row:
        scatter = communication.sequence_parallel
        kernel = communication.kernel("matmul_scatter" if scatter else "matmul_reduce")
        pending = communication.exchange if bias is None else None
        out, work = kernel(x, weight, group, addend=addend, async_op=pending is not None)
        if pending is not None:
            pending.output = work
        out = out if bias is None else out.add_(bias)
    else:
        out = kernels.matmul(x, weight, bias=bias, addend=addend)
    # Kernels may return views; autograd refuses to change a custom function's view in place, as
    # Megatron's cross entropy does with the logits. ``data`` is the same memory and no view.
    return out.data, gathered


def _gather_multiply(
    x: Tensor, weight: Tensor, communication: LinearCommunication, bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    gather_matmul, group = communication.kernel("gather_matmul"), communication.group
    begun = communication.exchange
    started = None if begun is None else begun.take("input")
    if started is not None:
        whole = gather(x, group, started)
        return kernels.matmul(whole, weight, bias=bias), whole
    ahead = regions.next_gather()
    if ahead is None or gather_matmul is not _PLAIN["gather_matmul"]:
        return gather_matmul(x, weight, group, bias=bias, keep=keep)  # type: ignore[no-any-return]
    gathered, work = comm.all_gather_first_dim(x, group, async_op=True)
    ahead.begin()
    work.wait()
    return kernels.matmul(gathered, weight, bias=bias), gathered


def _unread(x: Tensor, weight: Tensor, communication: LinearCommunication) -> Tensor:
    scatters = communication.row and communication.sequence_parallel
    rows = x.shape[0] // (comm.group_size(communication.group) if scatters else 1)
    return x.new_zeros(()).expand(rows, *x.shape[1:-1], weight.shape[0]).data


def saved_tensors(
    ctx: Any, grad: Tensor, communication: LinearCommunication
) -> tuple[tuple[Any, ...], Gathered | None]:
    """The saved tensors of a layer in its backward; a second run may compute them first.

    Args:
        grad: dy, ``[s, b, out]``, a shard of it as the layer requires.

    Returns:
        The tensors, and the gather of dy if the second run has started it.
    """
    if not communication.gathers_grad:
        return ctx.saved_tensors, None
    if communication.exchange is not None:
        return ctx.saved_tensors, communication.exchange.take("grad_output")
    group = communication.group
    with regions.ahead_of(lambda: comm.all_gather_first_dim(grad, group, async_op=True)) as ahead:
        saved = ctx.saved_tensors
    return saved, ahead.started


def multiply_gradient(
    grad: Tensor,
    weight: Tensor,
    communication: LinearCommunication,
    *,
    addend: Tensor | None = None,
    keep: bool = False,
    wgrad_follows: bool = False,
    gathered: Gathered | None = None,
) -> tuple[Tensor, Work, Tensor]:
    """The backward pass: ``dx = dy W`` with the collective of the layer.

    Args:
        grad: dy, ``[s, b, out]``, a shard of it as the layer requires.
        weight: W of this rank, ``[out, in]``, dtype of dy.
        addend: ``[s, b, in]`` of this rank of a column layer without sequence parallelism, added
            before the reduction; overwritten.
        keep: Return the gathered dy of a layer that gathers it.
        wgrad_follows: The caller computes a weight gradient before it waits.
        gathered: The gather of dy, if it has been started.

    Returns:
        dx (complete after ``wait()``); the handle, or None if there is nothing to wait for or an
        exchange has it; the gathered dy, or dy.
    """
    group = communication.group
    if gathered is not None:
        grad = gather(grad, group, gathered)
        return kernels.matmul(grad, weight, transposed=False), None, grad
    if communication.gathers_grad:
        gather_matmul = communication.kernel("gather_matmul")
        dx, whole = gather_matmul(grad, weight, group, transposed=False, keep=keep)
        return dx, None, grad if whole is None else whole
    if not communication.column:
        return kernels.matmul(grad, weight, transposed=False, addend=addend), None, grad
    kernel = communication.kernel(
        "matmul_scatter" if communication.sequence_parallel else "matmul_reduce"
    )
    options: dict[str, Any] = {"addend": addend, "wgrad_follows": wgrad_follows}
    dx, work = kernel(grad, weight, group, transposed=False, async_op=True, **options)
    if communication.exchange is not None:
        communication.exchange.grad_input, work = work, None
    return dx, work, grad


def gather_again(x: Tensor, communication: LinearCommunication) -> Gathered:
    """Start to gather the input ``[s/p, b, h]`` for a weight gradient, or return what has begun."""
    ahead = communication.exchange
    started = None if ahead is None else ahead.take("again")
    return started or comm.all_gather_first_dim(x, communication.group, async_op=True)


def gather(x: Tensor, group: Any, started: Gathered | None = None) -> Tensor:
    """Gather ``[s/p, b, h]``, any dtype, along s, without a product; or wait until it is done."""
    if started is None:
        return comm.all_gather_first_dim(x, group)[0]
    whole, work = started
    work.wait()
    return whole
