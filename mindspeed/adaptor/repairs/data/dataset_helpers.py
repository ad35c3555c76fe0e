"""Defect: the dataset index helper is compiled for another Python than the running one.

Where: ``megatron.core.datasets.utils.compile_helpers`` runs a Makefile that names the library with
the suffix of the first ``python3-config`` on the PATH; in a virtual environment that may belong to
another Python.
Symptom: "Failed to compile the C++ dataset helper functions", or an ImportError.
Fix: compile nothing if the helper can be imported; otherwise build it for the running interpreter
under a temporary name and rename it when complete, so that concurrent processes do not interfere.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from mindspeed.adaptor.patch import repair
from mindspeed.device import Device
from mindspeed.errors import DataError

_MODULE = "megatron.core.datasets.helpers_cpp"


def needed_on(device: Device, te: str) -> bool:
    """Whether CUDA kernels are missing."""
    return device.name != "cuda"


def build_for_this_python(original: Callable[[], None]) -> Callable[[], None]:
    """Replace ``compile_helpers``."""
    directory = Path(original.__code__.co_filename).parent

    def compile_helpers() -> None:
        ensure_helper(directory)

    return compile_helpers


def ensure_helper(directory: Path) -> None:
    """Build the helper where a checkout has none; several processes may do it at once.

    Args:
        directory: of ``megatron.core.datasets``.
    """
    if importlib.util.find_spec(_MODULE) is None:
        _build(directory)
        importlib.invalidate_caches()


def _build(directory: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    pybind11 = importlib.util.find_spec("pybind11")
    if compiler is None or pybind11 is None or pybind11.origin is None:
        missing = "a C++ compiler" if compiler is None else "the package pybind11"
        raise DataError(
            f"Megatron's dataset helper {_MODULE} is not built and {missing} is missing; "
            "install it, or the megatron-core wheel, which contains the helper"
        )
    library = directory / ("helpers_cpp" + sysconfig.get_config_var("EXT_SUFFIX"))
    unfinished = library.with_name(f".{library.name}.{os.getpid()}")
    command = [compiler, "-O3", "-Wall", "-shared", "-std=c++17", "-fPIC"]
    command += [f"-I{Path(pybind11.origin).parent / 'include'}"]
    command += [f"-I{sysconfig.get_path('include')}"]
    command += [str(directory / "helpers.cpp"), "-o", str(unfinished)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise DataError(
            f"building {library} for Python {sys.version.split()[0]} failed:\n{result.stderr}"
        )
    unfinished.rename(library)


PATCHES = (
    repair(
        "megatron.core.datasets.utils:compile_helpers",
        build_for_this_python,
        "build the dataset helper for the running Python, only when it is missing",
        kind="replace",
        expects="()",
    ),
)
