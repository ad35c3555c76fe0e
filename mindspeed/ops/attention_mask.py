"""Masks that kernels of NPU read: one for the process instead of one per micro-batch.

They read a causal mask of any length from a triangle of 2048 x 2048, 4 MiB, which is made once per
device; the CPU and CUDA need only the rule.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._guards import detect_fake_mode

COMPRESSED = 2048
"""Rows and columns of the compressed causal mask."""

_cache: dict[tuple[str, int, torch.device], torch.Tensor] = {}


def causal_mask(device: torch.device | str, size: int = COMPRESSED) -> torch.Tensor:
    """bool ``[size, size]``, True above the diagonal; one per size and device."""
    return _cached("causal", size, device, lambda: _ones(size, size, device).triu(1))


def prefix_mask(device: torch.device | str) -> torch.Tensor:
    """bool ``[3072, 2048]``: the triangle, below it a left half of False, a right one of True."""

    def make() -> torch.Tensor:
        rectangle = _ones(COMPRESSED // 2, COMPRESSED, device)
        rectangle[:, : COMPRESSED // 2] = False
        return torch.cat([_ones(COMPRESSED, COMPRESSED, device).triu(1), rectangle])

    return _cached("prefix", COMPRESSED, device, make)


def generate_attention_mask(
    compress: bool, device: torch.device | str, seq_length: int = COMPRESSED
) -> torch.Tensor:
    """Return the causal mask, True is masked.

    Args:
        compress: bool ``[2048, 2048]`` for any sequence length; else ``[seq_length, seq_length]``.
        device: Device of the mask.
        seq_length: Size of the mask that is not compressed.
    """
    return causal_mask(device, COMPRESSED if compress else seq_length)


def _ones(rows: int, columns: int, device: torch.device | str) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device)


def _cached(
    kind: str, size: int, device: torch.device | str, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    if detect_fake_mode() is not None:  # a fake tensor must not outlive its mode
        return make()
    key = (kind, size, torch.device(device))
    if key not in _cache:
        _cache[key] = make()
    return _cache[key]
