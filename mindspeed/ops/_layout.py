"""Axis orders of attention tensors, and views between them.

An order is written with a letter per axis: b batch, s sequence, n heads, d head size, and t for the
tokens of all sequences one after the other. ``BNSD`` is what formulas are written in; every other
order reaches it by a view.
"""

from __future__ import annotations

import torch

LAYOUTS = ("SBND", "BSND", "BNSD", "TND")


def bnsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """View ``x``, any dtype, as ``[b, n, s, d]``; TND becomes one sequence of t tokens."""
    if layout == "TND":
        return x.transpose(0, 1).unsqueeze(0)
    return x.permute([layout.index(axis) for axis in "BNSD"])


def axis(layout: str, name: str) -> int:
    """Position of an axis; asking TND for the sequence gives its tokens."""
    return layout.index("T" if layout == "TND" and name == "S" else name)
