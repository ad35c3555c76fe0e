"""How rows of tokens travel between the ranks of experts: as they are, or in eight bits.

    row of H elements     H bytes e4m3 | H / 128 bytes of scales | what else the row carries

Every block of 128 elements has a scale of its own, the least power of two s with
``max |x| <= 448 s``, sent as one byte. Powers of two change no digit, so the receiver's row is
exact in bf16, and quantising it once more (a second hop, a gather of slices) gives the same row.
With Q(x) what arrives for x,

    |Q(x) - x| <= max(|x| / 17, 2^-10 s)

for each element, reached at odd multiples of 1/16. A row takes (H + H / 128) / 2 H = .504 of its
bytes in bf16.

The experts compute with Q(x) in forward and in backward; the gradient of x is that of Q(x),
straight through. Results come back as they are, because they are summed over the experts of a
token; their gradients can be quantised. Probabilities and counts never are.

    Wire(hidden_size).tokens(AllToAll(...))          # in place of the collective
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed import spmd
from mindspeed.moe.split_phase import Collective, InFlight

BLOCK = 128
"""Elements that share a scale."""
_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_BIAS = 127  # of the byte that a scale is sent as
_NAN = 255
_LEAST, _MOST = -126, 127


def quantized_bytes(width: int) -> int:
    """Bytes of ``width`` elements, whole blocks, with their scales."""
    return width + width // BLOCK


def quantize(x: torch.Tensor) -> torch.Tensor:
    """Write rows in eight bits.

    Args:
        x: ``[n, h]`` in a floating dtype; 128 divides h. A block with a value that is not finite
            becomes nan.

    Returns:
        uint8 ``[n, h + h / 128]``, values and then scales.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = _exponents(largest)
    values = torch.ldexp(blocks, -exponent).to(_E4M3).view(torch.uint8)
    scales = torch.where(largest.isfinite(), exponent + _BIAS, _NAN).to(torch.uint8)
    return torch.cat([values.flatten(1), scales.squeeze(-1)], 1)


def dequantize(data: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`quantize`.

    Args:
        data: uint8 ``[n, h + h / 128]``.
        width: h.

    Returns:
        ``[n, h]`` in ``dtype``; exact in bf16 and wider.
    """
    values = data[:, :width].contiguous().view(_E4M3).float().unflatten(1, (-1, BLOCK))
    scales = data[:, width : quantized_bytes(width)].int().unsqueeze(-1)
    rows = torch.ldexp(values, scales - _BIAS).masked_fill(scales == _NAN, torch.nan)
    return rows.flatten(1).to(dtype)


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """Exponents, int32, of the least powers of two that 448 times exceed ``largest [...]``."""
    mantissa, exponent = torch.frexp(largest / _LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(_LEAST, _MOST)
    return torch.where(largest > 0, exponent, 0)


@dataclass(frozen=True)
class Wire:
    """The format of the rows of a layer.

    Attributes:
        width: H, the elements of a row that are quantised; 0: none.
        gradients: the gradients of results are quantised, too.
    """

    width: int = 0
    gradients: bool = False

    def tokens(self, collective: Collective) -> Collective:
        """A collective that brings tokens to experts."""
        return Quantized(collective, self.width) if self.width else collective

    def results(self, collective: Collective) -> Collective:
        """A collective that brings the experts' results back."""
        if not self.gradients:
            return collective
        return Quantized(collective, self.width, backward=True)


PLAIN = Wire()


@dataclass(frozen=True)
class Quantized:
    """A collective of whole rows, in eight bits in one of its passes.

    Attributes:
        collective: moves rows of any dtype in that pass, and adds nothing.
        width: elements of a row that are quantised; others travel as they are.
        backward: in backward, and not in forward.
    """

    collective: Collective
    width: int
    backward: bool = False

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return self.collective.typed()

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return self.collective.rows(rows)

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Send ``x [n, width + ...]``; the result has its dtype."""
        if self.backward:
            return self.collective.launch(x)
        data = self._written(x)
        return _Arriving.of(x, data, self.width, *self.collective.launch(data))

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Send the gradients ``grad [n, width + ...]`` of the result back."""
        if not self.backward:
            return self.collective.launch_reverse(grad)
        data = self._written(grad)
        return _Arriving.of(grad, data, self.width, *self.collective.launch_reverse(data))

    def _written(self, x: torch.Tensor) -> torch.Tensor:
        written = quantize(x[:, : self.width])
        if x.shape[1] == self.width:
            return written
        return torch.cat([written, x[:, self.width :].contiguous().view(torch.uint8)], 1)


@dataclass(frozen=True)
class _Arriving:
    """Quantised rows on their way, which become rows when they are waited for."""

    out: torch.Tensor
    data: torch.Tensor
    sent: torch.Tensor  # lives until the wait
    width: int
    work: InFlight | None

    @classmethod
    def of(
        cls,
        like: torch.Tensor,
        sent: torch.Tensor,
        width: int,
        data: torch.Tensor,
        work: InFlight | None,
    ) -> tuple[torch.Tensor, InFlight]:
        out = like.new_empty(len(data), like.shape[1])
        return out, cls(out, data, sent, width, work)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        width, out = self.width, self.out
        out[:, :width] = dequantize(self.data, width, out.dtype)
        if out.shape[1] > width:
            rest = self.data[:, quantized_bytes(width) :].flatten().clone()  # with no offset
            out[:, width:] = rest.view(out.dtype).view_as(out[:, width:])
