"""The torch_npu wheel, in a directory of its own that only the emulator puts on a path.

torch loads an installed torch_npu by itself and fails when CANN is missing, so the wheel must never
reach an ordinary environment. It is installed once, without its dependencies, under the user's
cache directory; concurrent test runs wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

VERSION = "2.13.0"


class WheelUnavailable(Exception):
    """The wheel cannot be had here; the text says why."""


def cache_directory() -> Path:
    """Where this interpreter's copy of the wheel and its stubs live."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Path(base) / "mindspeed-tests" / f"torch_npu-{VERSION}-{python}-{platform.machine()}"


def ensure_wheel() -> Path:
    """The directory that holds the package torch_npu, installed when it is not there yet.

    Raises:
        WheelUnavailable: this torch is not the wheel's, or pip cannot install it.
    """
    if torch.__version__.partition("+")[0] != VERSION:
        raise WheelUnavailable(
            f"torch_npu {VERSION} needs torch {VERSION}, this is {torch.__version__}"
        )
    target = cache_directory() / "site-packages"
    with locked(target.parent):
        if not target.exists():
            with replacing(target) as unfinished:
                _install(unfinished)
    return target


def _install(directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    only_this = ["--no-deps", "--only-binary=:all:", "--no-compile", "--target", str(directory)]
    patience = ["--retries", "1", "--timeout", "30"]
    done = subprocess.run(
        [*pip, *only_this, *patience, f"torch_npu=={VERSION}"], capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise WheelUnavailable(f"pip cannot install torch_npu {VERSION}: {reason}")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Waits until no other process works on `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `target` at once and only when the body succeeds."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield unfinished
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
