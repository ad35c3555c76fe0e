"""What several restatements share."""

from __future__ import annotations

from typing import Any

import torch

# Codes of `act_type` in the grouped products of torch_npu, and the names npu_ffn uses.
ACTIVATIONS = {
    0: lambda x: x,
    1: torch.relu,
    2: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: torch.nn.functional.silu,
}


def refuse(op: str, given: dict[str, Any]) -> None:
    """Stops at arguments whose meaning is not restated here, when they are given."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value not in (None, 0, False, "", []):
            raise NotImplementedError(f"npu::{op}: the NPU emulator does not restate {name}")


def require(op: str, condition: bool, rule: str) -> None:
    """Checks a limit that the documentation of torch_npu states."""
    if not condition:
        raise ValueError(f"npu::{op}: {rule}")


def sum_to(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sums over the dimensions that `like` was broadcast along."""
    return tensor.sum_to_size(like.shape).to(like.dtype)


def float_scale(scale: torch.Tensor) -> torch.Tensor:
    """An fp32 scale; int64 scales carry the bits of an fp32 number in their low half."""
    if scale.dtype == torch.int64:
        return scale.to(torch.int32).view(torch.float32)
    return scale.float()
