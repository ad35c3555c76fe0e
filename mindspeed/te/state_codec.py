"""How an optimizer state is stored: fp32, bf16, scaled fp16, scaled fp8, or the rest of a bf16.

``Remainder`` stores of an fp32 master weight ``x`` only what its bf16 parameter ``B`` lacks:

    bits(x) = (bits(B) << 16) + R        R signed 16 bit, B = x rounded half away from zero

so parameter and remainder together are the master weight, bit for bit.
"""

from __future__ import annotations

import torch

_FP8 = torch.float8_e4m3fn


class Codec:
    """fp32 storage; the base of the others."""

    dtype = torch.float32
    scaled = False

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Return the state in fp32, the stored tensor itself where that is its dtype."""
        return stored

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        scale: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Write ``value`` into ``stored`` (and ``scale``)."""
        stored.copy_(value)


class BFloat16(Codec):
    """bf16 storage: rounded, no scale needed."""

    dtype = torch.bfloat16

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Widen."""
        return stored.float()


class Scaled(Codec):
    """A narrow format with one fp32 scale per tensor that maps its largest value to ``top``."""

    scaled = True

    def __init__(self, dtype: torch.dtype, top: float) -> None:
        self.dtype, self.top = dtype, top

    def decode(
        self, stored: torch.Tensor, scale: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Widen and multiply by the scale."""
        assert scale is not None
        return stored.float().mul_(scale)

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        scale: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Choose the scale by the largest value, divide and round."""
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
        """Join parameter and remainder."""
        upper = param.detach().view(torch.int16).to(torch.int32) << 16
        return (upper + stored).view(torch.float32)

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        scale: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Split ``value`` into the parameter and the remainder; an int16 value is a remainder."""
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
        return Codec()
    if dtype == torch.bfloat16:
        return BFloat16()
    if dtype == torch.float16:
        return Scaled(torch.float16, torch.finfo(torch.float16).max / 2)
    if dtype == torch.uint8:
        return Scaled(_FP8, torch.finfo(_FP8).max)
    raise RuntimeError(
        f"FusedAdam: {what} can be fp32, fp16, bf16 or fp8 (torch.uint8), not {dtype}"
    )
