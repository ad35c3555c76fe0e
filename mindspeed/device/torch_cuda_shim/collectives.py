"""Collectives that gloo lacks or gets wrong, built from those that it has.

* dtypes that gloo does not support (float8, int16, unsigned 16/32/64 bit) are sent as bytes;
  reducing them raises an error, because a byte-wise sum is meaningless;
* ``PREMUL_SUM`` (sum of the inputs times a factor) multiplies first, then sums;
* what only newer torch's gloo has (:mod:`mindspeed.device.torch_versions`): ``AVG`` of floats is a
  ``PREMUL_SUM``, lists are reduced and exchanged as one tensor, complex numbers are sent as bytes;
* ``all_gather`` and ``all_gather_into_tensor`` take outputs of another shape with as many elements,
  as NCCL does;
* ``all_gather`` and ``reduce_scatter`` take parts of different sizes, as NCCL does (expert tensor
  parallelism needs it): one ``all_to_all_single`` sends the same bytes;
* ``gather`` of complex numbers sends pairs of reals.

Everything else is passed to torch unchanged; the wrappers cost one set look-up of the dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mindspeed.device.torch_versions import gloo_exchanges_lists, gloo_reduces_all
from mindspeed.journal import Journal

AS_BYTES = frozenset(
    getattr(torch, name)
    for name in (
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int16", "uint16", "uint32", "uint64"),
    )
    if hasattr(torch, name)
)
"""Dtypes that gloo cannot transport under their own name."""


class PremulSum:
    """The reduction ``sum(factor * input)``, what ``_make_nccl_premul_sum`` returns."""

    def __init__(self, factor: float | torch.Tensor) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return f"PremulSum({self.factor})"


def _available(op: Any, tensor: torch.Tensor, group: Any) -> Any:
    """``op``, or what has its result where gloo cannot reduce by it."""
    if op == dist.ReduceOp.AVG and tensor.is_floating_point() and not gloo_reduces_all():
        return PremulSum(1 / dist.get_world_size(group))
    return op


def _bytes(tensor: Any) -> Any:
    """A view of ``tensor`` as bytes that keeps its first dimension (for split sizes)."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dtype not in AS_BYTES and (gloo_reduces_all() or not tensor.is_complex()):
        return tensor
    wide = tensor if tensor.dim() else tensor.reshape(1)
    return wide.unsqueeze(-1).view(torch.uint8)


def _all_bytes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_bytes(tensor) for tensor in value]
    return _bytes(value)


def _moved(original: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """A collective without reduction; its first ``tensors`` arguments are tensors or lists."""

    @functools.wraps(original)
    def move(*args: Any, **kwargs: Any) -> Any:
        args = (*map(_all_bytes, args[:tensors]), *args[tensors:])
        for name in _TENSOR_KEYWORDS & kwargs.keys():
            kwargs[name] = _all_bytes(kwargs[name])
        return original(*args, **kwargs)

    return move


_TENSOR_KEYWORDS = {
    *("tensor", "tensor_list", "gather_list", "scatter_list", "input", "output"),
    *("input_tensor", "output_tensor", "input_tensor_list", "output_tensor_list"),
}


def _refuse_bytes(name: str, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype in AS_BYTES:
            raise TypeError(
                f"{name} cannot reduce {tensor.dtype} on gloo; cast to bfloat16 or float32 first "
                "(moving it with all_gather, all_to_all, broadcast or send works)"
            )


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        _refuse_bytes(original.__name__, (tensor,))
        op = _available(op, tensor, group)
        if isinstance(op, PremulSum):
            tensor.mul_(op.factor)
            op = dist.ReduceOp.SUM
        return original(tensor, op, group, async_op)

    return all_reduce


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce(
        tensor: torch.Tensor,
        dst: Any = None,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _refuse_bytes("reduce", (tensor,))
        op = _available(op, tensor, group)
        if isinstance(op, PremulSum):
            tensor.mul_(op.factor)
            op = dist.ReduceOp.SUM
        return original(tensor, dst, op, group, *args, **kwargs)

    return reduce


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """``reduce_scatter(output, input_list)`` and ``reduce_scatter_tensor(output, input)``."""

    @functools.wraps(original)
    def reduce_scatter(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _ReduceScatter.of(*args, **kwargs)
        inputs = call.input if isinstance(call.input, (list, tuple)) else (call.input,)
        _refuse_bytes(original.__name__, inputs)
        if _uneven(inputs):
            return _reduce_scatter_uneven(output, call)
        op = _available(call.op, output, call.group)
        if not isinstance(op, PremulSum):
            if op != dist.ReduceOp.SUM and not gloo_reduces_all():  # would sum without a word
                return _reduce_scatter_by_all_reduce(output, inputs, call)
            return original(output, call.input, op, call.group, call.async_op)
        scaled = [tensor * op.factor for tensor in inputs]
        whole = scaled if isinstance(call.input, (list, tuple)) else scaled[0]
        return original(output, whole, dist.ReduceOp.SUM, call.group, call.async_op)

    return reduce_scatter


def _reduce_scatter_by_all_reduce(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], call: _ReduceScatter
) -> Any:
    whole = torch.cat([part.reshape(-1) for part in inputs])
    dist.all_reduce(whole, call.op, call.group)
    mine = whole.view(-1, output.numel())[dist.get_rank(call.group)]
    output.copy_(mine.view(output.shape))
    return _Done() if call.async_op else None


def _reduce_scatter_list(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """``reduce_scatter`` by ``reduce_scatter_tensor``."""
    whole = torch.cat([part.reshape(-1) for part in input_list])
    return distributed_c10d.reduce_scatter_tensor(output.view(-1), whole, *args, **kwargs)


def _all_to_all(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``all_to_all`` by ``all_to_all_single``."""
    _exchange(outputs, inputs, group)
    return _Done() if async_op else None


class _ReduceScatter(NamedTuple):
    input: Any
    op: Any = dist.ReduceOp.SUM
    group: Any = None
    async_op: bool = False

    @classmethod
    def of(cls, *args: Any, input_list: Any = None, **kwargs: Any) -> _ReduceScatter:
        return cls(*args, **kwargs) if input_list is None else cls(input_list, *args, **kwargs)


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if isinstance(tensor, torch.Tensor) and any(
            out.shape != tensor.shape and out.numel() == tensor.numel() for out in tensor_list
        ):
            tensor_list = [out.view(tensor.shape) for out in tensor_list]
        if _uneven(tensor_list):
            _exchange(tensor_list, [tensor] * len(tensor_list), group)
            return _Done() if async_op else None
        return original(_all_bytes(tensor_list), _bytes(tensor), group, async_op)

    return all_gather


def _all_gather_single(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather_single(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        output, mine = _bytes(output_tensor), _bytes(input_tensor)
        if output.shape[1:] != mine.shape[1:] and output.is_contiguous():
            output, mine = output.view(-1), mine.reshape(-1)
        return original(output, mine, group, async_op)

    return all_gather_single


def _uneven(parts: Sequence[Any]) -> bool:
    sizes = {part.numel() for part in parts if isinstance(part, torch.Tensor)}
    return len(sizes) > 1


def _reduce_scatter_uneven(output: torch.Tensor, call: _ReduceScatter) -> Any:
    """Everybody sends each part to its owner, who adds them up in the order of ranks."""
    averaging = call.op == dist.ReduceOp.AVG
    if not averaging and call.op != dist.ReduceOp.SUM:
        raise ValueError(f"reduce_scatter of parts of different sizes can't reduce by {call.op}")
    received = [torch.empty_like(output) for _ in call.input]
    _exchange(received, call.input, call.group)
    total = torch.stack(received).sum(0)
    output.copy_(total / len(received) if averaging else total)
    return _Done() if call.async_op else None


def _exchange(outputs: Sequence[Any], inputs: Sequence[torch.Tensor], group: Any) -> None:
    """``all_to_all`` of parts of any sizes: one ``all_to_all_single`` of what they hold."""
    sent = torch.cat([part.reshape(-1) for part in inputs])
    received = sent.new_empty(sum(part.numel() for part in outputs))
    out_sizes, in_sizes = ([part.numel() for part in parts] for parts in (outputs, inputs))
    dist.all_to_all_single(received, sent, out_sizes, in_sizes, group)
    for part, values in zip(outputs, received.split(out_sizes), strict=True):
        part.copy_(values.view(part.shape))


class _Done:
    """The request of an asynchronous call that is complete already."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    move = _moved(original, 2)

    @functools.wraps(original)
    def gather(
        tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, *args: Any, **kw: Any
    ) -> Any:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
            gather_list = gather_list and [torch.view_as_real(out) for out in gather_list]
        return move(tensor, gather_list, *args, **kw)

    return gather


def install(journal: Journal) -> None:
    """Complete gloo's collectives in torch.distributed."""

    def put(name: str, value: Any) -> None:
        for holder in (distributed_c10d, dist):
            if name in vars(holder):
                journal.set(holder, name, value, owner="device")

    def wrap(name: str, wrapper: Callable[[Callable[..., Any]], Any]) -> None:
        put(name, wrapper(getattr(distributed_c10d, name)))

    put("_make_nccl_premul_sum", PremulSum)
    if not gloo_exchanges_lists():
        put("all_to_all", _all_to_all)
    if not gloo_reduces_all():
        put("reduce_scatter", _reduce_scatter_list)
    for name, tensors in (("broadcast", 1), ("scatter", 2), ("all_to_all", 2)):
        wrap(name, functools.partial(_moved, tensors=tensors))
    wrap("all_to_all_single", functools.partial(_moved, tensors=2))
    wrap("all_gather", _all_gather)
    wrap("gather", _gather)
    wrap("all_reduce", _all_reduce)
    wrap("reduce", _reduce)
    wrap("reduce_scatter", _reduce_scatter)
    # Newer torch renamed the single-tensor collectives and warns at every use of the old names.
    gathering = _newest("all_gather_single", "all_gather_into_tensor")
    scattering = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    for name in ("all_gather_into_tensor", "_all_gather_base", "all_gather_single"):
        put(name, _all_gather_single(gathering))
    for name in ("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"):
        put(name, _reduce_scatter(scattering))


def _newest(*names: str) -> Callable[..., Any]:
    return next(
        getattr(distributed_c10d, name) for name in names if hasattr(distributed_c10d, name)
    )
