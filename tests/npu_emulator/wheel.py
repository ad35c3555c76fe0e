"""The torch_npu wheel, which only the emulator puts on a path.

torch loads an installed torch_npu by itself and fails when CANN is missing, so the wheel must never
reach an ordinary environment.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support import wheels
from tests.support.wheels import WheelUnavailable

RELEASES = {"2.7.1": "2.7.1.post11", "2.9.1": "2.9.1", "2.10.0": "2.10.0", "2.13.0": "2.13.0"}
"""The torch_npu for each torch that the emulator runs with."""

LACKING = {
    "npu::_npu_moe_token_unpermute",
    "npu::npu_moe_token_permute_grad_v2",
    "npu::npu_moe_token_unpermute_grad_v2",
    "npu::npu_ring_attention_update",
}
"""Operators that torch_npu 2.9.1 and 2.10.0 lack; 2.7.1.post11 is newer."""
FALLBACKS = {"moe_unpermute", "ring_attention_update"}
"""Operators of the library that run their definition there."""


def lacks() -> bool:
    """Whether the torch_npu of this torch is one of those."""
    return version() in ("2.9.1", "2.10.0")


def cache_directory() -> Path:
    """Where this interpreter's copy of the wheel and its stubs live."""
    return wheels.cache_directory("torch_npu", version())


def version() -> str:
    """The torch_npu of this torch.

    Raises:
        WheelUnavailable: there is none.
    """
    release = torch.__version__.partition("+")[0]
    if release not in RELEASES:
        raise WheelUnavailable(
            f"the emulator runs with torch {', '.join(RELEASES)}, this is {torch.__version__}"
        )
    return RELEASES[release]


def ensure_wheel() -> Path:
    """The directory that holds the package torch_npu, installed when it is not there yet.

    Raises:
        WheelUnavailable: there is none for this torch, or pip cannot install it.
    """
    return wheels.ensure_wheel("torch_npu", version())
