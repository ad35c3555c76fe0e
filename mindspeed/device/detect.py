"""Selects the device of this process: ``MINDSPEED_DEVICE``, else NPU, else CUDA, else CPU.

torch_npu is imported only if NPU is selected, or if it is installed and the Ascend driver has
created a device node: the import takes seconds, and fails without CANN.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
from types import ModuleType

from mindspeed import plugins
from mindspeed.device.base import Device
from mindspeed.errors import ConfigError

_NAMES = ("cpu", "cuda", "npu")
_NO_CANN = ("libascendcl", "libhccl", "libge_runner", "libruntime", "libascend_hal", "libopapi")


def current() -> Device:
    """The device of this process; decided once per value of ``MINDSPEED_DEVICE``."""
    asked = os.environ.get("MINDSPEED_DEVICE", "").strip().lower()
    return named(asked or _detected())


@functools.cache
def named(name: str) -> Device:
    """The device called ``"cpu"``, ``"cuda"``, ``"npu"``, or as a plug-in's entry point.

    Raises:
        ConfigError: the name is unknown, or the device is not usable in this process.
    """
    if name == "cpu":
        from mindspeed.device.cpu import CpuDevice

        return CpuDevice()
    if name == "cuda":
        from mindspeed.device.accelerator import CudaDevice

        return CudaDevice()
    if name == "npu":
        from mindspeed.device.accelerator import NpuDevice

        return NpuDevice(import_torch_npu())
    if name not in plugins.entry_points(plugins.DEVICES):
        known = (*_NAMES, *plugins.entry_points(plugins.DEVICES))
        raise ConfigError(f"MINDSPEED_DEVICE={name!r} is unknown; use one of {', '.join(known)}")
    return plugins.load(plugins.DEVICES, name, _is_device, "a subclass of Device")()


def _is_device(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Device)


@functools.cache
def _detected() -> str:
    import torch

    if _npu_present():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _npu_present() -> bool:
    if importlib.util.find_spec("torch_npu") is None or not glob.glob("/dev/davinci[0-9]*"):
        return False
    return import_torch_npu().npu.is_available()


def import_torch_npu() -> ModuleType:
    """Import torch_npu, or raise an error that names what is missing.

    Raises:
        ConfigError: torch_npu is not installed, or CANN (the Ascend toolkit) is not set up.
    """
    try:
        import torch_npu
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise
        raise ConfigError(
            "MINDSPEED_DEVICE=npu needs the torch_npu package, which is not installed; install the "
            "release for this torch, or set MINDSPEED_DEVICE=cpu or cuda"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        if explanation := explain_npu_failure(error):
            raise ConfigError(explanation) from error
        raise
    return torch_npu


def explain_npu_failure(error: BaseException) -> str | None:
    """The message for a failed import of torch_npu if CANN is the reason, else None.

    torch itself loads torch_npu when it is installed, so ``import torch`` can fail the same way.
    """
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        library = next((name for name in _NO_CANN if name in text), None)
        if library or "ASCEND_HOME_PATH" in text or "set_env.sh" in text:
            return (
                f"torch_npu is installed but CANN is not usable here ({text.splitlines()[0]}). "
                "On an Ascend machine run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`; "
                "elsewhere set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and MINDSPEED_DEVICE=cpu (or cuda)"
            )
        seen = seen.__cause__ or seen.__context__
    return None
