"""Several tensors in one message: their columns concatenated row by row.

Packed keys and values are ``[t, g * d + g * d_v]``: all key heads, then all value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedKVShape:
    """Shape of a row of packed keys and values.

    Attributes:
        groups: Key and value heads, g.
        head_size: Of a key head, d.
        value_size: Of a value head, d_v.
    """

    groups: int
    head_size: int
    value_size: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> PackedKVShape:
        """Shape of keys ``[t, g, d]`` and values ``[t, g, d_v]``, any dtype."""
        return cls(k.shape[1], k.shape[2], v.shape[2])

    @property
    def key_width(self) -> int:
        """Columns of the keys; those of the values follow."""
        return self.groups * self.head_size

    @property
    def width(self) -> int:
        """All columns."""
        return self.groups * (self.head_size + self.value_size)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[t, g, d]`` and ``[t, g, d_v]`` of ``[t, width]``, any dtype."""
        k, v = packed[:, : self.key_width], packed[:, self.key_width :]
        return k.unflatten(1, (self.groups, -1)), v.unflatten(1, (self.groups, -1))


def pack(*tensors: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors ``[t, ...]`` to ``[t, columns]`` in the dtype of the first.

    A tensor of a wider dtype (fp32 statistics beside bf16 activations) keeps its bits: it is
    reinterpreted, not rounded. Round before packing what should be rounded.
    """
    dtype = tensors[0].dtype
    columns = (x.flatten(1) for x in tensors)
    columns = (x if x.dtype == dtype else x.contiguous().view(dtype) for x in columns)
    return torch.cat(tuple(columns), 1)


def unpack(
    packed: torch.Tensor, *shapes: tuple[tuple[int, ...], torch.dtype]
) -> list[torch.Tensor]:
    """The inverse of :func:`pack`: tensors ``[t, *shape]`` of the given dtypes."""
    found = []
    column = 0
    for shape, dtype in shapes:
        width = torch.Size(shape).numel() * dtype.itemsize // packed.itemsize
        part = packed[:, column : column + width]
        if dtype != packed.dtype:
            part = part.contiguous().view(dtype)
        found.append(part.unflatten(1, shape))
        column += width
    return found
