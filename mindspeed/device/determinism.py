"""Deterministic computing: two runs of a program give bitwise equal results.

    undo = make_deterministic(True)          # before the first kernel and the first collective
    ...
    undo()

Requirements differ per device. torch must select deterministic kernels on all of them; cuBLAS needs
a fixed workspace and NCCL a fixed order of reduction; HCCL and the Ascend matrix kernels are
configured by environment variables, which they read at first use. Hence the call must come early,
and raises after the first collective.

Random generators are not reseeded: seeds differ per pipeline stage and belong to the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from mindspeed.device.base import Device
from mindspeed.device.detect import current
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal

ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "cpu": {},
    "cuda": {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    },
    "npu": {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
}
"""Environment variables per device."""


def make_deterministic(enabled: bool, device: Device | None = None) -> Callable[[], None]:
    """Enable deterministic computing; return the function that restores the former state.

    Args:
        enabled: If false, nothing changes.
        device: the device that computes (default: the one of this process).

    Returns:
        A function that restores the former settings and environment.

    Raises:
        ConfigError: a communication backend has already read its environment, or the environment
            requires the opposite.
    """
    journal = Journal()
    if not enabled:
        return journal.undo
    device = device or current()
    variables = ENVIRONMENT.get(device.name, {})
    _check(device.name, variables)
    for name, value in variables.items():
        _set_environment(journal, name, value)
    _set_torch(journal)
    return journal.undo


def _check(device: str, variables: Mapping[str, str]) -> None:
    wrong = {
        name: os.environ[name]
        for name, value in variables.items()
        if os.environ.get(name, value) not in _accepted(name, value)
    }
    if wrong:
        given = ", ".join(f"{name}={value}" for name, value in wrong.items())
        wanted = ", ".join(f"{name}={variables[name]}" for name in wrong)
        raise ConfigError(
            f"deterministic computing on {device} needs {wanted}, but the environment has {given}; "
            "unset it, or drop --npu-deterministic / --use-deter-comp"
        )
    missing = [name for name in variables if name not in os.environ]
    if missing and dist.is_initialized() and dist.get_backend() != "gloo":
        raise ConfigError(
            f"deterministic computing on {device} must be switched on before torch.distributed is "
            f"initialised: set {', '.join(missing)} in the environment of the launcher"
        )


def _accepted(name: str, value: str) -> tuple[str, ...]:
    """All accepted values of a variable: ours, and others that are deterministic as well."""
    others = {
        "CUBLAS_WORKSPACE_CONFIG": (":16:8",),
        "NCCL_ALGO": ("Tree", "CollnetChain", "CollnetDirect", "^NVLS"),
        "HCCL_DETERMINISTIC": ("TRUE", "True", "strict"),
    }
    return (value, *others.get(name, ()))


def _set_environment(journal: Journal, name: str, value: str) -> None:
    before = os.environ.get(name)
    if before is not None:
        return
    os.environ[name] = value
    journal.call_on_undo(lambda: os.environ.pop(name, None))


def _set_torch(journal: Journal) -> None:
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark

    def restore() -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags

    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    journal.call_on_undo(restore)
