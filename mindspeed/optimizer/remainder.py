"""Master weights without the bits that their bf16 parameters hold.

The fp32 master weight ``x`` of a bf16 parameter ``B`` is stored as what ``B`` lacks, in 16 bits:

    bits(x) = (bits(B) << 16) + R            B = x rounded to nearest even, -32768 <= R <= 32767

``B`` is the parameter itself, with the value that a cast of ``x`` gives, so forward and backward
are those of a run with a copy of its own. A ``B`` with an even last bit has 65,537 preimages, one
more than ``R`` has values: ``x`` half way to the next bf16 value would need R = 32768. It is stored
as 32767, one unit in the last place of fp32 below ``x``, in one of 2 ** 17 cases; with ``exact``
one more bit per weight says where that happened, and nothing is lost.

(Rounding half away from zero instead makes ``R`` fit, as in Transformer Engine, at the price of
another ``B`` in those cases. Decoding is the same formula, so such remainders can be read.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.optimizer.codecs import StateCodec

_LARGEST = 2**15 - 1


class Remainder(StateCodec):
    """The int16 rest of a master weight.

    Args:
        exact: Keep one more bit per weight, and with it every bit of the master weight.
    """

    dtype = torch.int16

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.block = 8 if exact else 1

    def allocate_extra(self, param: Tensor) -> Tensor | None:
        """Allocate uint8 ``[ceil(n / 8)]`` for a parameter of n elements, with ``exact``."""
        if not self.exact:
            return None
        return torch.zeros(-(-param.numel() // 8), dtype=torch.uint8, device=param.device)

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Join bf16 parameter and int16 remainder to fp32, elementwise."""
        bits = param.detach().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        bits += stored
        if extra is not None:
            bits += unpacked(extra, bits.numel()).view(bits.shape)
        return bits.view(torch.float32)

    def encode(self, value: Tensor, stored: Tensor, extra: Tensor | None, param: Tensor) -> None:
        """Split ``value``, fp32, into bf16 parameter and int16 remainder, elementwise.

        A value in int16 is a remainder already.
        """
        if value.dtype == torch.int16:
            stored.copy_(value)
            return
        upper = value.to(torch.bfloat16)
        rest = value.view(torch.int32) - (upper.view(torch.int16).to(torch.int32) << 16)
        if extra is not None:
            extra.copy_(packed(rest > _LARGEST))
        # Of a NaN the rest has no meaning, and every rest decodes to a NaN.
        stored.copy_(rest.clamp_(-_LARGEST - 1, _LARGEST))
        param.detach().copy_(upper)


def packed(flags: Tensor) -> Tensor:
    """Eight bool flags a byte, the first in the lowest bit: uint8 ``[ceil(n / 8)]``."""
    bits = flags.reshape(-1).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << _shifts(bits)).sum(1, dtype=torch.uint8)


def unpacked(bytes_: Tensor, count: int) -> Tensor:
    """The inverse of :func:`packed`: uint8 ``[count]``, 0 or 1."""
    return (bytes_[:, None] >> _shifts(bytes_)).bitwise_and_(1).view(-1)[:count]


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
