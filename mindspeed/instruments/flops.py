"""Counts the FLOPs that a block of code executes, with and without recomputation.

    with FlopCounter() as counter:
        loss = model(batch)
        loss.backward()
    counter.count.total                  # everything: numerator of the hardware utilisation (HFU)
    counter.count.without_recompute      # numerator of the model utilisation (MFU)

A ``TorchDispatchMode`` sees every operator of forward and backward and adds its formula.
:mod:`mindspeed.instruments.instrument` recognises recomputation of any activation checkpoint; the
backward of recomputed layers still counts as backward. The scores that a fused attention kernel
recomputes in its backward count as recomputation.

Not seen: kernels launched without an operator (they call :func:`add`), and replayed graphs.

torch.utils.flop_counter has formulas of matrix products, convolutions and the attention kernels of
CUDA. The formulas here complete it: products with an accumulator written in place (weight
gradients), grouped products of MoE experts, vector products, and the attention kernels of the CPU
and of devices outside torch.

A multiplication and an addition count as two operations. Fused attention counts what its kernels
compute: of a causal mask (``is_causal``) only the pairs of queries and keys that see each other,
where torch's own formulas count all, of a mask given as a tensor all; its backward five products,
because the kernels recompute the scores (:func:`repeated_in`). Operators of mindspeed register
their formula where they are defined, with ``torch.utils.flop_counter.register_flop_formula``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments.instrument import Instrument


@dataclass(frozen=True)
class FlopCount:
    """Floating point operations of one rank."""

    total: int = 0
    recompute: int = 0

    @property
    def without_recompute(self) -> int:
        """Forward and backward once, without recomputation."""
        return self.total - self.recompute

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(self.total + other.total, self.recompute + other.recompute)


class FlopCounter(Instrument):
    """Context manager that counts; ``count`` is readable at any time, counters may nest."""

    def __init__(self) -> None:
        super().__init__()
        self.count = FlopCount()
        self.mode = _Mode(self._add)

    def enter_contexts(self, stack: ExitStack) -> None:
        """Receive what :func:`add` reports too."""
        super().enter_contexts(stack)
        stack.enter_context(received_by(lambda flops: self._add(flops, 0)))

    def _add(self, flops: int, repeated: int) -> None:
        if self.phase.current() == "recompute":
            repeated = flops
        self.count += FlopCount(flops, repeated)


def add(flops: int) -> None:
    """Add FLOPs of work without an operator, such as a raw Triton launch, to all counters."""
    for receive in _receivers:
        receive(flops)


@contextmanager
def received_by(receive: Callable[[int], None]) -> Iterator[None]:
    """Call ``receive`` with what :func:`add` is told inside the block."""
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)


_receivers: list[Callable[[int], None]] = []


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention

    def __init__(self, add: Callable[[int, int], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_wraps(types):
            return NotImplemented
        kwargs = kwargs or {}
        operator = getattr(func, "_overloadpacket", func)
        formula = formula_of(operator)
        if formula is None and torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # composite operators arrive whole in this mode
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            self._add(flops, repeated_in(operator, args, flops))
        return result


Formula = Callable[..., int]


def formula_of(operator: Any) -> Formula | None:
    """The formula of an operator such as ``torch.ops.aten.mm``; None if it has no FLOPs."""
    formula = flop_registry.get(operator) or _FORMULAS.get(operator)
    names = _ARGUMENTS.get(operator)
    return formula if formula is None or names is None else _of_visible_pairs(formula, names)


def _of_visible_pairs(formula: Formula, names: tuple[str, ...]) -> Formula:
    """``formula`` counts all pairs of queries and keys; without those that a causal mask hides.

    Args:
        formula: of an attention on ``[b, n, s, d]``.
    """

    def counted(*args: Any, **kwargs: Any) -> int:
        flops = formula(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        if not given.get("is_causal"):
            return flops
        queries, keys = given["query"].shape[-2], given["key"].shape[-2]
        return flops * _causal_pairs(queries, keys) // max(1, queries * keys)

    return counted


def _causal_pairs(queries: int, keys: int) -> int:
    """Query i sees the keys 0 to i."""
    seen = min(queries, keys)
    return seen * (seen + 1) // 2 + max(0, queries - keys) * keys


def repeated_in(operator: Any, args: Sequence[Any], flops: int) -> int:
    """The part of ``flops`` that repeats forward work inside the operator: attention scores.

    Of the five products of an attention backward three have the head size of the queries and two
    that of the values; one of the three is the scores.
    """
    ours = str(operator) == _OUR_ATTENTION_BACKWARD  # it may not be defined in this process
    if operator not in _ATTENTION_BACKWARDS and not ours:
        return 0
    d, dv = args[1].shape[-1], args[3].shape[-1]  # (grad, query, key, value, ...)
    return flops * d // (3 * d + 2 * dv)


def _product(left: torch.Tensor, right: torch.Tensor) -> int:
    """``[..., m, k] @ [..., k, n]``; a missing dimension is 1."""
    columns = right.shape[-1] if right.dim() > 1 else 1
    return 2 * left.numel() * columns


def _plain(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    return _product(left, right)


def _added(_: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *__: Any, **___: Any) -> int:
    return _product(left, right)


def _grouped(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Grouped matrix product: rows multiply one of several matrices, or groups of columns sum.

    ``[t, k] x [g, k, n]``, ``[g, m, k] x [k, t]``, ``[m, t] x [t, n]`` (weight gradients) and the
    batched ``[g, m, k] x [g, k, n]`` all cost two operations per row, column and summand.
    """
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * left.numel() * right.shape[-1] if right.dim() == 3 else 2 * _middle(left, right)


def _middle(left: torch.Tensor, right: torch.Tensor) -> int:
    return left.shape[1] * left.shape[2] * right.shape[1]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores and weighted sum, ``[b, n, s, d]``."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *__: Any,
    **___: Any,
) -> int:
    """Scores again, gradients of query and key (head size d), of probabilities and value."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


def _batches(lefts: list[torch.Tensor], rights: list[torch.Tensor], *_: Any, **__: Any) -> int:
    return sum(map(_product, lefts, rights))


_BY_NAME: dict[str, Formula] = {
    "mv": _plain,
    "dot": _plain,
    "vdot": _plain,
    "_int_mm": _plain,
    "_scaled_mm_v2": _plain,
    "_foreach_mm": _batches,
    "addmm_": _added,
    "addmv": _added,
    "addmv_": _added,
    "addbmm": _added,
    "addbmm_": _added,
    "baddbmm_": _added,
    "_addmm_activation": _added,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}
_FORMULAS: dict[Any, Formula] = {
    getattr(torch.ops.aten, name): formula
    for name, formula in _BY_NAME.items()
    if hasattr(torch.ops.aten, name)  # some are newer than the oldest supported torch
}
_ARGUMENTS: dict[Any, tuple[str, ...]] = {  # of the attention operators with is_causal
    packet: tuple(argument.name for argument in packet.default._schema.arguments)
    for packet in (
        getattr(torch.ops.aten, name)
        for name in dir(torch.ops.aten)
        if name.startswith("_scaled_dot_product_") and not name.endswith("_for_mps")
    )
}
_OUR_ATTENTION_BACKWARD = "mindspeed.attention_backward"
_ATTENTION_BACKWARDS = {
    getattr(torch.ops.aten, name)
    for name in (
        "_flash_attention_backward",
        "_efficient_attention_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward",
    )
    if hasattr(torch.ops.aten, name)
}
