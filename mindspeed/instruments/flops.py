"""Counts the FLOPs that a block of code executes, with and without recomputation.

    with FlopCounter() as counter:
        loss = model(batch)
        loss.backward()
    counter.count.total                  # everything: numerator of the hardware utilisation (HFU)
    counter.count.without_recompute      # numerator of the model utilisation (MFU)

A ``TorchDispatchMode`` sees every operator of forward and backward and adds its formula.
:mod:`mindspeed.instruments.phase` recognises recomputation of any activation checkpoint; the
backward of recomputed layers still counts as backward. The scores that a fused attention kernel
recomputes in its backward count as recomputation.

Not seen: kernels launched without an operator (they call :func:`add`), and replayed graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments.flop_formulas import formula_of, repeated_in
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
