"""A substitute for the ``transformer_engine`` package: Megatron's own door for replaced modules.

    from mindspeed.journal import Journal
    from mindspeed import te
    te.install(Journal())                  # before megatron.core is imported

Megatron's wrappers (``TELinear``, ``TEGroupedLinear``, ``TEDotProductAttention`` ...), its default
flags and its checkpoint names then work unchanged on CPU and NPU, and on a GPU without NVIDIA's
package. ``MINDSPEED_TE=auto|substitute|native`` decides; ``auto`` takes the native package when it
imports on CUDA. :mod:`mindspeed.te.package` lists what can be imported. fp8 casts are emulated on
the CPU (:mod:`mindspeed.te.fp8`); userbuffers and CUDA graphs stay out: the flags that need them
are refused by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Literal

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal

VERSION = "2.9.0"
"""The version of transformer_engine whose interface is offered."""

Choice = Literal["native", "substitute"]

_log = logging.getLogger("mindspeed")


def choose(device_name: str) -> tuple[Choice, str]:
    """Say which implementation serves ``device_name``, and why.

    Args:
        device_name: ``"cpu"``, ``"cuda"`` or ``"npu"``.
    """
    policy = os.environ.get("MINDSPEED_TE", "auto")
    if policy not in ("auto", "substitute", "native"):
        raise ConfigError(f"MINDSPEED_TE={policy!r} is not one of auto, substitute, native")
    if policy == "substitute":
        return "substitute", "MINDSPEED_TE=substitute"
    if device_name != "cuda":
        if policy == "native":
            raise ConfigError(
                f"MINDSPEED_TE=native needs a CUDA device, this process runs on {device_name}; "
                "set MINDSPEED_TE=auto or MINDSPEED_DEVICE=cuda"
            )
        return "substitute", f"NVIDIA's package does not run on {device_name}"
    problem = _native_problem()
    if problem is None:
        return "native", f"transformer_engine {_native_version()} imports on CUDA"
    if policy == "native":
        raise ConfigError(f"MINDSPEED_TE=native, but {problem}; set MINDSPEED_TE=auto")
    return "substitute", problem


def is_substitute() -> bool:
    """Say whether the modules registered in this process are the substitute's."""
    module = sys.modules.get("transformer_engine")
    spec = getattr(module, "__spec__", None)
    return getattr(spec, "origin", None) == "mindspeed.te"


def install(journal: Journal, device_name: str | None = None) -> Choice:
    """Register the substitute unless the native package serves this device.

    Args:
        device_name: Device to choose for; the active device when None.

    Raises:
        ImportError: When Megatron has already decided that there is no Transformer Engine.
    """
    from mindspeed import device
    from mindspeed.te import package

    choice, reason = choose(device_name or device.current().name)
    if choice == "native" or is_substitute():
        return choice
    if _decided_without("megatron.core.extensions.transformer_engine"):
        raise ImportError(
            "import mindspeed.megatron_adaptor before megatron.core: "
            "megatron.core.extensions.transformer_engine is already loaded without Transformer "
            "Engine"
        )
    if "transformer_engine" in sys.modules or _installed():
        _log.info("transformer_engine is replaced by mindspeed.te: %s", reason)
    package.install(journal, VERSION)
    return choice


def _decided_without(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module, "HAVE_TE", True)


def _native_problem() -> str | None:
    if is_substitute():
        return "the substitute is registered"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        return f"transformer_engine does not import ({error})"
    except Exception as error:  # a broken build raises anything while it loads its libraries
        return f"transformer_engine is broken on this machine ({type(error).__name__}: {error})"
    return None


def _installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _native_version() -> str:
    return str(getattr(sys.modules["transformer_engine"], "__version__", "of unknown version"))
