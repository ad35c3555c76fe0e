"""Probabilities packed into the rows of tokens: one collective carries both, bit for bit.

    bf16 row of h elements:   x_0 ... x_{h-1} | two elements: the bits of an fp32 probability | 0

The rows are as long as a multiple of 16 bytes. Room for the probability is made before tokens are
copied to rows, so packing moves a token once and not once for each of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.moe.collectives import sum_in_fp32
from mindspeed.spmd import Local, typed

_PITCH = 16
"""Bytes that the length of a row is a multiple of: kernels of grouped products require it."""


@dataclass(frozen=True)
class Packing:
    """How rows and probabilities lie in one tensor.

    Attributes:
        width: elements of a row, h.
        dtype: of the rows.
        probs: dtype of the probabilities.
    """

    width: int
    dtype: torch.dtype
    probs: torch.dtype

    @classmethod
    def of(cls, rows: torch.Tensor, probs: torch.Tensor) -> Packing:
        """The packing of ``rows [n, h]`` and ``probs``, floating dtypes."""
        return cls(rows.shape[-1], rows.dtype, probs.dtype)

    @property
    def columns(self) -> int:
        """Elements of a packed row."""
        used = (self.width + self._elements) * self.dtype.itemsize
        return -(-used // _PITCH) * _PITCH // self.dtype.itemsize

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Make room: ``[n, h]`` to ``[n, columns]``."""
        return torch.nn.functional.pad(rows, (0, self.columns - self.width))

    def pack(self, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Write ``probs [m]`` into the widened ``rows [m, columns]``, in place; returns them."""
        return _Pack.apply(rows, probs, self)  # type: ignore[no-any-return]

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``packed [m, columns]`` as ``rows [m, h]``, a view of it, and ``probs [m]``."""
        return _Unpack.apply(packed, self)  # type: ignore[no-any-return]

    def add(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum packed gradients ``parts [ranks, m, columns]`` over the ranks: ``[m, columns]``."""
        packed = self.widen(sum_in_fp32(parts[..., : self.width]))
        self.write(packed, sum_in_fp32(torch.stack([self.read(part) for part in parts])))
        return packed

    @property
    def _elements(self) -> int:
        """Elements of a row that the bits of a probability take."""
        return self._bits.itemsize // self.dtype.itemsize

    @property
    def _bits(self) -> torch.dtype:
        """A dtype that represents probabilities exactly and is no smaller than an element."""
        return self.probs if self.probs.itemsize >= self.dtype.itemsize else self.dtype

    def write(self, packed: torch.Tensor, probs: torch.Tensor) -> None:
        """Write ``probs [m]`` into ``packed [m, columns]``."""
        bits = probs.to(self._bits).contiguous().view(self.dtype).view(-1, self._elements)
        packed[:, self.width : self.width + self._elements] = bits

    def read(self, packed: torch.Tensor) -> torch.Tensor:
        """The probabilities ``[m]`` of ``packed [m, columns]``."""
        bits = packed[:, self.width : self.width + self._elements].contiguous()
        return bits.view(self._bits).view(-1).to(self.probs)


@typed(Local())
class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, probs: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        ctx.packing = packing
        packing.write(rows, probs)
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        # What was the probability's gradient is that of the room, which nobody reads.
        return grad, ctx.packing.read(grad), None


@typed(Local())
class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, packing: Packing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.packing = packing
        return packed[:, : packing.width], packing.read(packed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        rows, probs = grads
        packed = ctx.packing.widen(rows)
        ctx.packing.write(packed, probs)
        return packed, None
