"""Stand-ins for the CUDA extensions that Megatron's fused softmax imports.

``FusedScaleMaskSoftmax`` is on by default (``--no-masked-softmax-fusion`` switches it off) and
imports ``scaled_masked_softmax_cuda``, ``scaled_upper_triang_masked_softmax_cuda`` or
``scaled_softmax_cuda`` inside its functions; without them a 16-bit model ends in an ImportError.
Each has ``forward`` and ``backward`` without autograd, on scores ``[b, n, sq, sk]``, for the
triangular mask ``[b * n, s, s]``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from mindspeed.ops.scaled_masked_softmax import SOFTMAX, SOFTMAX_BACKWARD


def modules() -> dict[str, ModuleType]:
    """The three modules by name."""
    return {
        "scaled_masked_softmax_cuda": _module(
            "scaled_masked_softmax_cuda",
            forward=lambda x, mask, scale: SOFTMAX(x, mask.bool(), float(scale), False),
            backward=_backward,
            get_batch_per_block=lambda sq, sk, b, n: 1,  # any shape will do
        ),
        "scaled_upper_triang_masked_softmax_cuda": _module(
            "scaled_upper_triang_masked_softmax_cuda",
            forward=lambda x, scale: SOFTMAX(x[None], None, float(scale), True)[0],
            backward=lambda dy, y, scale: SOFTMAX_BACKWARD(
                dy[None], y[None], None, float(scale), True
            )[0],
        ),
        "scaled_softmax_cuda": _module(
            "scaled_softmax_cuda",
            forward=lambda x, scale: SOFTMAX(x, None, float(scale), False),
            backward=_backward,
        ),
    }


def _backward(dy: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """No mask is passed: masked scores have probability 0, and so gradient 0."""
    return SOFTMAX_BACKWARD(dy, y, None, float(scale), False)


def _module(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module
