"""Tensors that travel together, as the columns of one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyValueShape:
    """Sizes of keys and values, which lie behind each other in a packed row."""

    groups: int
    head_size: int
    value_size: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> KeyValueShape:
        """From ``[t, g, d]`` and ``[t, g, d_v]``."""
        return cls(k.shape[1], k.shape[2], v.shape[2])

    @property
    def border(self) -> int:
        """Elements of keys in a packed row; values lie behind them."""
        return self.groups * self.head_size

    @property
    def width(self) -> int:
        """Elements of a packed row."""
        return self.groups * (self.head_size + self.value_size)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[t, g, d]`` and ``[t, g, d_v]``."""
        k, v = packed[:, : self.border], packed[:, self.border :]
        return k.unflatten(1, (self.groups, -1)), v.unflatten(1, (self.groups, -1))


def pack(*tensors: torch.Tensor) -> torch.Tensor:
    """Tensors ``[t, ...]`` as rows of one tensor in the dtype of the first.

    Statistics of a wider dtype keep their bits; what is to be rounded is rounded before.
    """
    dtype = tensors[0].dtype
    rows = (x.flatten(1) for x in tensors)
    rows = (x if x.dtype == dtype else x.contiguous().view(dtype) for x in rows)
    return torch.cat(tuple(rows), 1)


def unpack(
    packed: torch.Tensor, *shapes: tuple[tuple[int, ...], torch.dtype]
) -> list[torch.Tensor]:
    """The inverse: tensors ``[t, *shape]`` of these dtypes."""
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
