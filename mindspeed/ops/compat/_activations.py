"""Activations of the quantised products and of the feed-forward network, by code and by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def fast_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)`` (Hendrycks and Gimpel, 2016), elementwise."""
    return x * torch.sigmoid(1.702 * x)


BY_CODE: Mapping[int, Activation] = {
    0: lambda x: x,
    1: F.relu,
    2: partial(F.gelu, approximate="tanh"),
    4: fast_gelu,
    5: F.silu,
}
"""``act_type`` of torch_npu's grouped products."""

PLAIN: Mapping[str, Activation] = {
    "fastgelu": fast_gelu,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}
"""Activations of one input, by the names of ``npu_ffn``."""

GATED: Mapping[str, Activation] = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}
"""The first half goes through the activation and is multiplied with the second."""


def apply(name: str, x: Tensor) -> Tensor:
    """Apply a key of :data:`PLAIN` or :data:`GATED` (``[..., 2 f]``: gate, up) to ``[..., f]``."""
    if name in PLAIN:
        return PLAIN[name](x)
    gate, up = x.chunk(2, -1)
    return GATED[name](gate) * up
