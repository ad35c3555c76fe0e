"""How an optimizer state is stored: fp32, bf16, scaled fp16.

Formats with an idea of their own have modules of their own: fp8 with a scale per block
(:mod:`mindspeed.optimizer.block_fp8`), master weights without the bits that the bf16 parameter
holds (:mod:`mindspeed.optimizer.remainder`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Occasion:
    """Time and place at which a state is stored: what random rounding is keyed by.

    Attributes:
        step: of the optimizer, from 1; 0 before the first.
        start: position in the parameter of the first element that is stored.
    """

    step: int = 0
    state: str = ""
    start: int = 0


class StateCodec:
    """The storage of one state of every parameter; the base of the others.

    ``value`` is a state in fp32 (fp64 for a parameter of fp64), ``param`` its parameter, both of
    the parameter's shape; ``stored`` and ``extra`` are what :meth:`allocate` and
    :meth:`allocate_extra` returned.

    Attributes:
        dtype: of the stored tensor.
        block: elements that share one entry of ``extra``; any number of whole blocks, flat, can be
            coded apart from the rest. None: only the whole state can be coded.
        quantized: rounds so coarsely that some parameters are better stored in fp32
            (:func:`mindspeed.te.optimizer_policy.keeps_fp32`).
    """

    dtype = torch.float32
    block: int | None = None
    quantized = False

    def at(self, occasion: Occasion) -> StateCodec:
        """The codec that encodes on this occasion: another one where it rounds at random."""
        return self

    def allocate(self, param: Tensor) -> Tensor:
        """Return uninitialised storage in ``dtype`` for a state of ``param``."""
        return torch.empty_like(param, dtype=self.dtype, requires_grad=False)

    def allocate_extra(self, param: Tensor) -> Tensor | None:
        """Return what decoding needs next to it, flat: scales or bits ``[n]``; or None."""
        return None

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Return the state in fp32, the stored tensor itself where that is its dtype."""
        return stored

    def encode(self, value: Tensor, stored: Tensor, extra: Tensor | None, param: Tensor) -> None:
        """Write ``value``, fp32, into ``stored`` and ``extra``."""
        stored.copy_(value)


class Full(StateCodec):
    """The state as it is: fp32, or fp64 for a parameter of fp64."""

    block = 1

    def allocate(self, param: Tensor) -> Tensor:
        """A tensor like the parameter: fp32, or fp64 for fp64."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        return torch.empty_like(param, dtype=dtype, requires_grad=False)


class AbsentState(StateCodec):
    """A state that the update rule does not have, but Megatron's checkpoints do: zeros."""

    def allocate(self, param: Tensor) -> Tensor:
        """Nothing: fp32 ``[0]``."""
        return torch.empty(0, dtype=self.dtype, device=param.device)

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Zeros of the parameter's shape, fp32."""
        return torch.zeros_like(param, dtype=self.dtype, requires_grad=False)

    def encode(self, value: Tensor, stored: Tensor, extra: Tensor | None, param: Tensor) -> None:
        """No-op: no state is stored."""


class BFloat16(StateCodec):
    """bf16 storage: rounded, no scale needed."""

    dtype = torch.bfloat16
    block = 1

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Widen bf16 to fp32, elementwise."""
        return stored.float()


class Scaled(StateCodec):
    """A narrow format with one fp32 scale per tensor that maps its largest value to ``top``."""

    def __init__(self, dtype: torch.dtype, top: float) -> None:
        self.dtype, self.top = dtype, top

    def allocate_extra(self, param: Tensor) -> Tensor:
        """One fp32 number for the tensor, ``[1]``."""
        return torch.ones(1, dtype=torch.float32, device=param.device)

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Widen to fp32, elementwise, and multiply by the scale ``[1]``."""
        assert extra is not None
        return stored.float().mul_(extra)

    def encode(self, value: Tensor, stored: Tensor, extra: Tensor | None, param: Tensor) -> None:
        """Choose the fp32 scale ``[1]`` by the largest magnitude, divide and round, elementwise."""
        assert extra is not None
        peak = value.abs().amax() if value.numel() else value.new_zeros(())
        extra.copy_(peak / self.top)
        inverse = torch.where(extra > 0, extra.reciprocal(), torch.zeros_like(extra))
        stored.copy_(value * inverse)
