"""Errors as large as those of rounding, planted into every recorded tensor.

``a = c * u + u32 * sqrt(n) / 2`` is the error of one value that n terms make up: u of the dtype
in which it is stored, u32 of the accumulator, c = 1/2 for fp32 and 1 for narrow types. A run whose
every tensor, forward and backward, is multiplied by ``1 + a * xi`` with xi uniform in [-1, 1] shows
how the model carries such errors on: along layers, through softmax and norms, into the optimizer.
"""

from __future__ import annotations

import math
import zlib

import torch

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff by dtype."""


def amplitude(dtype: str, reduction: int) -> float:
    """Relative rounding error of one value of a tensor.

    Args:
        dtype: Of the tensor, without ``torch.``.
        reduction: How many products or terms make up one value.
    """
    unit = UNIT.get(dtype, UNIT["float32"])
    stored = unit if dtype in ("bfloat16", "float16") else unit / 2
    return stored + UNIT["float32"] * math.sqrt(reduction) / 2


class Noise:
    """Multiplies tensors by ``1 + a * xi``.

    Args:
        seed: Of this run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def on(self, x: torch.Tensor, name: str, reduction: int) -> torch.Tensor:
        """A perturbed copy, of the same dtype.

        Args:
            x: Any shape and floating dtype ``[...]``.
            name: Of the tensor on this rank, which chooses the numbers.
            reduction: How many products or terms make up one value.
        """
        seed = zlib.crc32(name.encode()) * 1_000_003 + self._seed
        generator = torch.Generator(x.device).manual_seed(seed)
        xi = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32) * 2 - 1
        a = amplitude(str(x.dtype).removeprefix("torch."), reduction)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.detach().to(wide) * (1 + a * xi)).to(x.dtype)
