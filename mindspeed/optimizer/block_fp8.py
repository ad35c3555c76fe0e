"""Moments of Adam in fp8 (E4M3), with one fp32 scale per 256 elements.

**Scale.** The smallest power of two that brings the largest magnitude of a block to 448, the
largest number of E4M3, or below. A state that is written to a checkpoint in fp32 and stored again
is then the same number, and a resumed run continues bit for bit.

**Square root.** The second moment is a square: its values span twice as many orders of magnitude as
those of the first. In linear E4M3 many of them are 0 where the first moment is not, and
``m / (sqrt(v) + eps)`` explodes. :class:`RootBlockFp8` stores the square root, and a positive value
as no less than the smallest positive number of its block.

**Rounding.** A moment changes by 1 - beta of itself in a step, 0.1 % for the second moment, and the
numbers of E4M3 are 6 to 12 % apart: rounded to nearest it would stop at a sixth of the mean of the
squared gradients, rounded up grow to many times of it. The distance to the two neighbours
is therefore the probability of each (stochastic rounding), so changes add up. The random number is
a hash of the value that is rounded: equal runs, and a resumed one, round equally.

    1 + 4/256 bytes per element      relative error < 2 ** -3, of a second moment < 2 ** -2
"""

from __future__ import annotations

import torch

from mindspeed.optimizer.codecs import Codec

BLOCK = 256
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_NORMAL = torch.finfo(torch.float8_e4m3fn).smallest_normal
_STEPS = 8  # numbers of E4M3 from one power of two to the next
_SMALLEST = _SMALLEST_NORMAL / _STEPS
_EXPONENT = 0x7F800000  # of an fp32 number


class BlockFp8(Codec):
    """A signed state in E4M3: the first moment."""

    dtype = torch.float8_e4m3fn
    block = BLOCK

    def allocate_extra(self, param: torch.Tensor) -> torch.Tensor:
        """The scales, fp32 ``[ceil(n / 256)]`` for a parameter (any shape) of n elements."""
        blocks = -(-param.numel() // BLOCK)
        return torch.zeros(blocks, dtype=torch.float32, device=param.device)

    def decode(
        self, stored: torch.Tensor, extra: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Widen E4M3 (any shape) to fp32 and multiply each block by its scale."""
        assert extra is not None
        value = stored.to(torch.float32, memory_format=torch.contiguous_format)
        for blocks, scales in _blocks(value, extra):
            blocks.mul_(scales)
        return value

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        extra: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Choose the scales of ``value`` (fp32, any shape), divide and round stochastically."""
        assert extra is not None
        scaled = value.clone(memory_format=torch.contiguous_format)
        for blocks, scales in _blocks(scaled, extra):
            scales.copy_(_power_of_two(blocks.abs().amax(1, keepdim=True).div_(_LARGEST)))
            blocks.mul_(torch.where(scales > 0, scales.reciprocal(), 0.0))
        stored.copy_(self._rounded(scaled))

    def _rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        return _stochastically_rounded(scaled)


class RootBlockFp8(BlockFp8):
    """A state that is never negative, as its square root in E4M3: the second moment."""

    def decode(
        self, stored: torch.Tensor, extra: torch.Tensor | None, param: torch.Tensor
    ) -> torch.Tensor:
        """Widen E4M3 (any shape) to fp32, multiply each block by its scale, and square."""
        return super().decode(stored, extra, param).square_()

    def encode(
        self,
        value: torch.Tensor,
        stored: torch.Tensor,
        extra: torch.Tensor | None,
        param: torch.Tensor,
    ) -> None:
        """Store the square root of ``value`` (fp32, any shape)."""
        super().encode(value.sqrt(), stored, extra, param)

    def _rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        rounded = _stochastically_rounded(scaled)
        return torch.where(scaled > 0, rounded.clamp(min=_SMALLEST), rounded)


def _blocks(tensor: torch.Tensor, scales: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the whole blocks of a contiguous tensor, and of the last, shorter one.

    Args:
        tensor: Any shape and dtype, n elements.
        scales: ``[ceil(n / 256)]``.

    Returns:
        Up to two pairs: blocks ``[b, 256]`` or ``[1, rest]``, and scales ``[b, 1]``.
    """
    flat = tensor.view(-1)
    count = flat.numel() // BLOCK
    pairs = [
        (flat[: count * BLOCK].view(-1, BLOCK), scales[:count, None]),
        (flat[count * BLOCK :].view(1, -1), scales[count:, None]),
    ]
    return [(blocks, own) for blocks, own in pairs if blocks.numel()]


def _power_of_two(value: torch.Tensor) -> torch.Tensor:
    """The smallest normal power of two that is not below a value >= 0 (fp32, any shape); 0 of 0."""
    return ((value.view(torch.int32) + 0x7FFFFF) & _EXPONENT).view(torch.float32)


def _stochastically_rounded(value: torch.Tensor) -> torch.Tensor:
    """Round fp32 (any shape, magnitudes up to 448) to numbers of E4M3, up or down at random.

    A number of E4M3 stays what it is; the mean over many values is not changed.
    """
    bits = value.view(torch.int32)
    power = (bits & _EXPONENT).view(torch.float32).clamp_(min=_SMALLEST_NORMAL)
    step = power.div_(_STEPS)
    return (value / step).add_(_uniform(bits)).floor_().mul_(step)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Pseudo-random numbers in [0, 1), multiples of 2 ** -16, fp32: a hash (xorshift) of int32."""
    bits = bits ^ (bits << 13)
    bits ^= bits >> 17
    bits ^= bits << 5
    return (bits & 0xFFFF).to(torch.float32).mul_(2.0**-16)
