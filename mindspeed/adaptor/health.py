"""What ``mindspeed doctor`` looks at: each check says what it found and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from typing import Literal

from mindspeed import __version__, device, te
from mindspeed.adaptor.versions import (
    TESTED,
    has_megatron_training,
    is_tested,
    megatron_root,
    megatron_version,
)
from mindspeed.device import torch_versions
from mindspeed.errors import MindSpeedError

SCRIPT_PACKAGES = ("pydantic", "regex", "six")
"""What ``pretrain_gpt.py`` of Megatron-LM imports and neither torch nor we require."""


@dataclass(frozen=True)
class HealthCheck:
    """One line of the report; ``bad`` means that training will not work."""

    status: Literal["ok", "note", "bad"]
    what: str
    found: str
    advice: str = ""


def examine() -> list[HealthCheck]:
    """All checks, without importing Megatron."""
    return [
        HealthCheck("ok", "mindspeed", f"{__version__}, Python {platform.python_version()}"),
        _torch(),
        _megatron(),
        _script_packages(),
        *_device(),
        _dataset_helpers(),
        _rendezvous(),
    ]


def _torch() -> HealthCheck:
    import torch

    version = torch.__version__
    if torch_versions.at_least(torch_versions.OLDEST):
        return HealthCheck("ok", "torch", version)
    advice = f"install torch {torch_versions.OLDEST} or newer (tested: {torch_versions.TESTED})"
    return HealthCheck("bad", "torch", version, advice)


def _megatron() -> HealthCheck:
    version = megatron_version()
    if version is None:
        advice = "pip install 'mindspeed[megatron]', or put a Megatron-LM checkout on PYTHONPATH"
        return HealthCheck("bad", "megatron-core", "not installed", advice)
    found = f"{version} in {megatron_root()}"
    if is_tested(version):
        return HealthCheck("ok", "megatron-core", found)
    return HealthCheck("bad", "megatron-core", found, f"install one of {', '.join(TESTED)}")


def _script_packages() -> HealthCheck:
    missing = [name for name in SCRIPT_PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return HealthCheck("ok", "packages of the scripts", ", ".join(SCRIPT_PACKAGES))
    return HealthCheck(
        "bad" if has_megatron_training() else "note",
        "packages of the scripts",
        f"not installed: {', '.join(missing)}",
        f"pip install {' '.join(missing)}, or 'mindspeed[megatron]'",
    )


def _device() -> list[HealthCheck]:
    try:
        current = device.current()
    except MindSpeedError as error:
        return [HealthCheck("bad", "device", "none", str(error))]
    engine, reason = te.choose(current.name)
    wanted = os.environ.get("MINDSPEED_DEVICE")
    chosen = "MINDSPEED_DEVICE" if wanted else "detected"
    checks = [
        HealthCheck("ok", "device", f"{current.name} ({chosen}), collectives by {current.backend}"),
        HealthCheck("ok", "Transformer Engine", f"{engine}: {reason}"),
    ]
    if current.name != "npu" and _installed("torch-npu"):
        advice = "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where CANN is missing, or remove torch_npu"
        checks.append(HealthCheck("note", "torch_npu", "installed, but no NPU answers", advice))
    return checks


def _dataset_helpers() -> HealthCheck:
    root = megatron_root()
    if root is None:
        return HealthCheck("note", "dataset helpers", "no Megatron")
    if any((root / "megatron/core/datasets").glob("helpers_cpp*.so")):
        return HealthCheck("ok", "dataset helpers", "built")
    if shutil.which(os.environ.get("CXX", "c++")) and importlib.util.find_spec("pybind11"):
        return HealthCheck("note", "dataset helpers", "not built", "the first run builds them")
    return HealthCheck("bad", "dataset helpers", "not built", "install a C++ compiler and pybind11")


def _rendezvous() -> HealthCheck:
    address = os.environ.get("MASTER_ADDR", "")
    if address in ("", "127.0.0.1", "localhost", "::1"):
        return HealthCheck("ok", "rendezvous", "loopback: nothing listens to other machines")
    return HealthCheck(
        "note", "rendezvous", address, "other machines can connect: use a trusted network"
    )


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
