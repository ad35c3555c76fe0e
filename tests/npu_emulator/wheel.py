"""The torch_npu wheel, which only the emulator puts on a path.

torch loads an installed torch_npu by itself and fails when CANN is missing, so the wheel must never
reach an ordinary environment.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support import wheels
from tests.support.wheels import WheelUnavailable

RELEASES = {
    **{"2.7.1": "2.7.1.post11", "2.8.0": "2.8.0.post5", "2.9.1": "2.9.1", "2.10.0": "2.10.0"},
    **{"2.11.0": "2.11.0", "2.12.0": "2.12.0", "2.13.0": "2.13.0"},
}
"""The torch_npu for each torch that the emulator runs with."""

_NEW = frozenset({"npu::_npu_moe_token_unpermute", "npu::npu_moe_token_unpermute_grad_v2"})
_NEWER = _NEW | {"npu::npu_moe_token_permute_grad_v2", "npu::npu_ring_attention_update"}
_LACKING = {
    **{"2.8.0.post5": _NEWER, "2.9.1": _NEWER, "2.10.0": _NEWER},
    **{"2.11.0": _NEW, "2.12.0": _NEW},
}
_FALLBACKS = {
    "moe_unpermute": "npu::npu_moe_token_permute_grad_v2",
    "ring_attention_update": "npu::npu_ring_attention_update",
}


def lacking() -> frozenset[str]:
    """Operators that the torch_npu of this torch lacks; 2.7.1.post11 is a new one."""
    return _LACKING.get(version(), frozenset())


def falls_back(name: str) -> bool:
    """Whether an operator of the library runs its definition, for want of one of torch_npu's."""
    return _FALLBACKS.get(name) in lacking()


def is_old() -> bool:
    """Whether a product with an all-reduce has no ``comm_mode``."""
    return version() in ("2.8.0.post5", "2.9.1", "2.10.0")


def has_narrow_meta() -> bool:
    """Whether the meta kernel of attention gives the output the head size of queries."""
    return version() in _LACKING


def cache_directory() -> Path:
    """Where this interpreter's copy of the wheel and its stubs live."""
    return wheels.cache_directory("torch_npu", version())


def version() -> str:
    """The torch_npu of this torch.

    Raises:
        WheelUnavailable: there is none, or it ends a process whose torch has CUDA, since both
            register the same setting of allocators.
    """
    release = torch.__version__.partition("+")[0]
    if release not in RELEASES:
        raise WheelUnavailable(
            f"the emulator runs with torch {', '.join(RELEASES)}, this is {torch.__version__}"
        )
    if torch.version.cuda and RELEASES[release] == "2.13.0":
        raise WheelUnavailable("torch_npu 2.13.0 needs a torch without CUDA")
    return RELEASES[release]


def ensure_wheel() -> Path:
    """The directory that holds the package torch_npu, installed when it is not there yet.

    Raises:
        WheelUnavailable: there is none for this torch, or pip cannot install it.
    """
    return wheels.ensure_wheel("torch_npu", version())
