"""Operands of a product as the matrix unit of an NPU takes them fastest (``matmul_soc_friendly``).

Rows in memory should begin at multiples of 512 bytes. A transposed layout of the right matrix, or
zeros that lengthen the inner dimension, change no result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_BLOCK, _UNIT = 512, 32  # bytes: of a memory access, of the smallest alignment


def aligned_right(
    rows: int, b: torch.Tensor, *, k_min: int = 1024, k_max: int = 4096
) -> torch.Tensor:
    """The right matrix of ``[rows, k] x [k, n]``, laid out or padded.

    Args:
        rows: of one product, that is of one part.
        b: ``[k, n]``, any dtype and strides.
        k_min: no shorter k is padded: the copies cost more than they gain.
        k_max: nor a longer one.

    Returns:
        ``[k, n]``, or ``[k', n]`` with zeros at the end of k; ``mindspeed.ops._overlap`` pads the
        left matrix to match.
    """
    k, n = b.shape
    block, unit = _BLOCK // b.element_size(), _UNIT // b.element_size()
    outer = rows % block == 0 and n % block == 0
    if k % block == 0:
        return b if outer else b.t().contiguous().t()
    if k % unit and outer and k_min <= k <= k_max:
        return F.pad(b, (0, 0, 0, -k % block))
    return b
