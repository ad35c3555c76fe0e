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
a hash of the optimizer's step, the state and the element's position in the parameter
(:class:`mindspeed.optimizer.codecs.Occasion`): equal runs, and a resumed one, round equally. It
must be another in every step: drawn from the value alone, a moment that gets no gradient would be
rounded back to itself in every step, and never decay.

**What is not stored so.** Rows of an embedding get gradients in the steps in which their tokens
occur, so one scale holds moments of very different sizes; routers decide with small differences;
small tensors save nothing. :func:`keeps_fp32` says which parameters these are.

    1 + 4/256 bytes per element      relative error < 2 ** -3, of a second moment < 2 ** -2
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from mindspeed.optimizer.codecs import Occasion, StateCodec

BLOCK = 256
SMALL = 4096  # elements of a parameter, as in bitsandbytes
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_NORMAL = torch.finfo(torch.float8_e4m3fn).smallest_normal
_STEPS = 8  # numbers of E4M3 from one power of two to the next
_SMALLEST = _SMALLEST_NORMAL / _STEPS
_EXPONENT = 0x7F800000  # of an fp32 number


class BlockFp8(StateCodec):
    """A signed state in E4M3: the first moment.

    Args:
        occasion: keys the random numbers. None: each call of :meth:`encode` draws others.
    """

    dtype = torch.float8_e4m3fn
    block = BLOCK
    quantized = True

    def __init__(self, occasion: Occasion | None = None) -> None:
        self._occasion, self._calls = occasion, 0

    def at(self, occasion: Occasion) -> BlockFp8:
        """This codec with the random numbers of a step and a position."""
        return type(self)(occasion)

    def allocate_extra(self, param: Tensor) -> Tensor:
        """The scales, fp32 ``[ceil(n / 256)]`` for a parameter of n elements."""
        blocks = -(-param.numel() // BLOCK)
        return torch.zeros(blocks, dtype=torch.float32, device=param.device)

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Widen E4M3 to fp32 and multiply each block by its scale."""
        assert extra is not None
        value = stored.to(torch.float32, memory_format=torch.contiguous_format)
        for blocks, scales in _blocks(value, extra):
            blocks.mul_(scales)
        return value

    def encode(self, value: Tensor, stored: Tensor, extra: Tensor | None, param: Tensor) -> None:
        """Choose the scales of ``value`` (fp32), divide and round stochastically."""
        assert extra is not None
        scaled = value.clone(memory_format=torch.contiguous_format)
        for blocks, scales in _blocks(scaled, extra):
            scales.copy_(_power_of_two(blocks.abs().amax(1, keepdim=True).div_(_LARGEST)))
            blocks.mul_(torch.where(scales > 0, scales.reciprocal(), 0.0))
        self._calls += 1
        stored.copy_(self._rounded(scaled, self._occasion or Occasion(self._calls)))

    def _rounded(self, scaled: Tensor, occasion: Occasion) -> Tensor:
        return _stochastically_rounded(scaled, occasion)


class RootBlockFp8(BlockFp8):
    """A state that is never negative, as its square root in E4M3: the second moment."""

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Widen E4M3 to fp32, multiply each block by its scale, and square."""
        return super().decode(stored, extra, param).square_()

    def encode(self, value: Tensor, stored: Tensor, extra: Tensor | None, param: Tensor) -> None:
        """Store the square root of ``value``, fp32, elementwise."""
        super().encode(value.sqrt(), stored, extra, param)

    def _rounded(self, scaled: Tensor, occasion: Occasion) -> Tensor:
        rounded = _stochastically_rounded(scaled, occasion, root=True)
        return torch.where(scaled > 0, rounded.clamp(min=_SMALLEST), rounded)


def _blocks(tensor: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor]]:
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


def _power_of_two(value: Tensor) -> Tensor:
    """Elementwise, fp32: the smallest normal power of two not below a value >= 0; 0 of 0."""
    return ((value.view(torch.int32) + 0x7FFFFF) & _EXPONENT).view(torch.float32)


def _stochastically_rounded(value: Tensor, occasion: Occasion, root: bool = False) -> Tensor:
    """Round fp32 (magnitudes up to 448), elementwise, to numbers of E4M3, up or down at random.

    A number of E4M3 stays what it is; the mean over many steps or positions is not changed. That of
    the squares would grow: with ``root`` the chances are half way to those that keep it, so that
    neither the root nor the square is far off.
    """
    power = (value.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=_SMALLEST_NORMAL)
    step = power.div_(_STEPS)
    whole = (value / step).floor_()
    chance = value / step - whole
    if root:
        chance *= (4 * whole + 1 + chance) / (4 * whole + 2)
    noise = _uniform(value.numel(), occasion, value.device).view(value.shape)
    return chance.add_(noise).floor_().add_(whole).mul_(step)


def _uniform(count: int, occasion: Occasion, place: torch.device) -> Tensor:
    """Pseudo-random numbers in [0, 1), multiples of 2 ** -16: fp32 ``[count]`` on ``place``."""
    first = occasion.start
    positions = torch.arange(first, first + count, device=place).to(torch.int32)  # modulo 2 ** 32
    bits = _mixed(positions.bitwise_xor_(_key(occasion)))
    return (bits & 0xFFFF).to(torch.float32).mul_(2.0**-16)


def _mixed(bits: Tensor) -> Tensor:
    """A hash of int32, in place: each bit of the input flips half of the output's."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits.bitwise_xor_(bits >> shift).mul_(factor)
    return bits.bitwise_xor_(bits >> 16)


def _key(occasion: Occasion) -> int:
    """A hash of step and state, of 31 bits."""
    text = f"{occasion.state} {occasion.step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


def keeps_fp32(param: Tensor) -> bool:
    """Whether the moments of a parameter ``[...]``, or of a shard of one, are better not in fp8.

    ``param.rare_gradients`` marks embeddings and routers; a shard's ``parameter_shape`` is the
    whole parameter's.
    """
    shape: tuple[int, ...] = getattr(param, "parameter_shape", param.shape)
    return bool(getattr(param, "rare_gradients", False)) or math.prod(shape) < SMALL
