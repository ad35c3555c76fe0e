"""A substitute for the ``transformer_engine`` package: Megatron's own door for replaced modules.

    from mindspeed.journal import Journal
    from mindspeed import te
    te.install(Journal())                  # before megatron.core is imported

Megatron's wrappers (``TELinear``, ``TEGroupedLinear``, ``TEDotProductAttention`` ...), its default
flags and its checkpoint names then work unchanged on CPU and NPU, and on a GPU without NVIDIA's
package. ``MINDSPEED_TE=auto|substitute|native`` decides; ``auto`` takes a native package when it
imports: NVIDIA's on CUDA, Ascend's TransformerEngineNPU on an NPU, which is ``transformer_engine``
or ``transformer_engine_npu``. :mod:`mindspeed.te.package` lists what can be imported. fp8 casts are
emulated on the CPU (:mod:`mindspeed.te.fp8`); userbuffers and CUDA graphs stay out: the flags that
need them are refused by name.
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

ASCEND = "transformer_engine_npu"
"""Ascend's package, where it does not take the name of NVIDIA's."""

Choice = Literal["native", "substitute"]

_DEVICES = {"cuda": "CUDA", "npu": "an NPU"}
"""Where there are native packages, and the words of messages."""

SUBCLASSED = (
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
)
"""Modules without which Megatron takes a Transformer Engine for absent."""

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
    if device_name not in _DEVICES:
        if policy == "native":
            raise ConfigError(
                f"MINDSPEED_TE=native needs a CUDA device or an NPU, this process runs on "
                f"{device_name}; set MINDSPEED_TE=auto or MINDSPEED_DEVICE=cuda"
            )
        return "substitute", f"no native package runs on {device_name}"
    name = _native_name(device_name)
    problem = _native_problem(name, device_name)
    if problem is None:
        return "native", f"{name} {_version_of(name)} imports on {_DEVICES[device_name]}"
    if policy == "native":
        raise ConfigError(f"MINDSPEED_TE=native, but {problem}; set MINDSPEED_TE=auto")
    return "substitute", problem


def is_substitute() -> bool:
    """Say whether the modules registered in this process are the substitute's."""
    module = sys.modules.get("transformer_engine")
    spec = getattr(module, "__spec__", None)
    return getattr(spec, "origin", None) == "mindspeed.te"


def install(journal: Journal, device_name: str | None = None) -> Choice:
    """Register the substitute, or a native package under the name that Megatron imports.

    Args:
        device_name: Device to choose for; the active device when None.

    Raises:
        ImportError: When Megatron has already decided that there is no Transformer Engine.
    """
    from mindspeed import device
    from mindspeed.te import package

    here = device_name or device.current().name
    choice, reason = choose(here)
    if is_substitute():
        return choice
    name = _native_name(here)
    if choice == "native" and here == "npu":
        package.install_extensions(journal)
    if choice == "native" and name == "transformer_engine":
        return choice
    if _decided_without("megatron.core.extensions.transformer_engine"):
        raise ImportError(
            "import mindspeed.megatron_adaptor before megatron.core: "
            "megatron.core.extensions.transformer_engine is already loaded without Transformer "
            "Engine"
        )
    if "transformer_engine" in sys.modules or _installed():
        by = "mindspeed.te" if choice == "substitute" else name
        _log.info("transformer_engine is replaced by %s: %s", by, reason)
    if choice == "native":
        package.install_alias(journal, name)
    else:
        package.install(journal, VERSION)
    return choice


def _decided_without(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module, "HAVE_TE", True)


def _native_name(device_name: str) -> str:
    """The package that would serve the device."""
    return ASCEND if device_name == "npu" and _installed(ASCEND) else "transformer_engine"


def _native_problem(name: str, device_name: str) -> str | None:
    if is_substitute():
        return "the substitute is registered"
    try:
        modules = vars(importlib.import_module(f"{name}.pytorch"))
    except ImportError as error:
        return f"{name} does not import ({error})"
    except Exception as error:  # a broken build raises anything while it loads its libraries
        return f"{name} is broken on this machine ({type(error).__name__}: {error})"
    if missing := [module for module in SUBCLASSED if module not in modules]:
        return f"{name} {_version_of(name)} lacks {', '.join(missing)}"
    # NVIDIA's and Ascend's may have the same name and version; Ascend's says what it is.
    if device_name == "npu" and name != ASCEND and "NPU" not in (sys.modules[name].__doc__ or ""):
        return f"{name} {_version_of(name)} is NVIDIA's, which does not run on npu"
    return None


def _installed(name: str = "transformer_engine") -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _version_of(name: str) -> str:
    return str(getattr(sys.modules[name], "__version__", "of unknown version"))
