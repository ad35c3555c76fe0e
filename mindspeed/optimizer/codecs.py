"""How an optimizer state is stored: fp32, bf16, scaled fp16 or fp8, or 16 low mantissa bits.

``Remainder`` stores of an fp32 master weight ``x`` only what its bf16 parameter ``B`` lacks:

    bits(x) = (bits(B) << 16) + R        R signed 16 bit, B = x rounded half away from zero

so parameter and remainder together are the master weight, bit for bit.
"""

from __future__ import annotations

import torch

_FP8 = torch.float8_e4m3fn


class Codec:
    """The storage of one state of every parameter; the base of the others.

    ``value`` is a state in fp32 (fp64 for a parameter of fp64), ``param`` its parameter, both of
    the parameter's shape; ``stored`` and ``scale`` are what :meth:`allocate` and
    :meth:`allocate_scale` returned.
    """

    dtype = torch.float32

    def allocate(self, param: torch.Tensor) -> torch.Tensor:
        """Return uninitialised storage in ``dtype`` for a state of ``param``, any shape."""
        return torch.empty_like(param, dtype=self.dtype, requires_grad=False)

    def allocate_scale(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the scale of a state of ``param`` (any shape), fp32 ``[1]``, or None."""
        return None

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Return the state in fp32, the stored tensor itself where that is its dtype.

        Args:
            stored: Shape of ``param``, storage dtype.
            scale: fp32 ``[1]``, or None for a codec without scale.
            param: Any shape and floating dtype.
        """
        return stored

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        scale: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Write ``value`` into ``stored`` (and ``scale``).

        Args:
            value: Shape of ``param``, fp32.
            stored: Shape of ``param``, storage dtype; overwritten.
            scale: fp32 ``[1]``, overwritten, or None for a codec without scale.
            param: Any shape and floating dtype.
        """
        stored.copy_(value)


class Full(Codec):
    """The state as it is: fp32, or fp64 for a parameter of fp64."""

    def allocate(self, param: torch.Tensor) -> torch.Tensor:
        """A tensor like the parameter, any shape: fp32, or fp64 for fp64."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        return torch.empty_like(param, dtype=dtype, requires_grad=False)


class Absent(Codec):
    """A state that the update rule does not have, but Megatron's checkpoints do: zeros."""

    def allocate(self, param: torch.Tensor) -> torch.Tensor:
        """A scalar, fp32."""
        return torch.zeros((), dtype=self.dtype, device=param.device)

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Zeros of the parameter's shape (any shape), fp32."""
        return torch.zeros_like(param, dtype=self.dtype, requires_grad=False)

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        scale: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Do nothing, for any shape and dtype: no state is stored."""


class BFloat16(Codec):
    """bf16 storage: rounded, no scale needed."""

    dtype = torch.bfloat16

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Widen bf16 to fp32, elementwise."""
        return stored.float()


class Scaled(Codec):
    """A narrow format with one fp32 scale per tensor that maps its largest value to ``top``."""

    def __init__(self, dtype: torch.dtype, top: float) -> None:
        self.dtype, self.top = dtype, top

    def allocate_scale(self, param: torch.Tensor) -> torch.Tensor:
        """One fp32 number for the tensor, ``[1]``."""
        return torch.ones(1, dtype=torch.float32, device=param.device)

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Widen fp16 or fp8 to fp32, elementwise, and multiply by the scale ``[1]``."""
        assert scale is not None
        return stored.float().mul_(scale)

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        scale: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Choose the fp32 scale ``[1]`` by the largest magnitude, divide and round, elementwise."""
        assert scale is not None
        peak = value.abs().amax() if value.numel() else value.new_zeros(())
        scale.copy_(peak / self.top)
        inverse = torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))
        stored.copy_(value * inverse)


class Remainder(Codec):
    """The 16 bits of an fp32 master weight that its bf16 parameter lacks."""

    dtype = torch.int16

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Join bf16 parameter and int16 remainder to fp32, elementwise."""
        upper = param.detach().view(torch.int16).to(torch.int32) << 16
        return (upper + stored).view(torch.float32)

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        scale: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Split ``value`` (fp32, any shape) into bf16 parameter and int16 remainder, elementwise.

        A value in int16 is a remainder already.
        """
        if value.dtype == torch.int16:
            stored.copy_(value)
            return
        bits = value.contiguous().view(torch.int32)
        half = bits << 16 >> 16
        rounded = ((bits - half) >> 16).to(torch.int16).view(torch.bfloat16)
        # Carrying into the upper half would turn some NaNs into numbers.
        rounded = torch.where(value.isnan(), value.to(torch.bfloat16), rounded)
        param.detach().copy_(rounded.view_as(param))
        stored.copy_(half.view_as(stored))


def codec_for(dtype: torch.dtype, what: str) -> Codec:
    """Return the codec for a storage dtype; ``torch.uint8`` means fp8."""
    if dtype == torch.float32:
        return Full()
    if dtype == torch.bfloat16:
        return BFloat16()
    if dtype == torch.float16:
        return Scaled(torch.float16, torch.finfo(torch.float16).max / 2)
    if dtype == torch.uint8:
        return Scaled(_FP8, torch.finfo(_FP8).max)
    raise RuntimeError(
        f"FusedAdam: {what} can be fp32, fp16, bf16 or fp8 (torch.uint8), not {dtype}"
    )
