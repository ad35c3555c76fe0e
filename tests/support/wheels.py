"""Packages that must not be in the test environment, each in a directory of its own.

torch_npu breaks ``import torch`` without CANN; Triton changes what Megatron imports. A wheel is
installed once, without its dependencies, under the user's cache directory, and only the processes
that want it put the directory on their path. Concurrent test runs wait for each other.
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


class WheelUnavailable(Exception):
    """The wheel is not available here; the text says why."""


def cache_directory(package: str, version: str) -> Path:
    """Where this interpreter's copy of a wheel, and what is built from it, lives."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Path(base) / "mindspeed-tests" / f"{package}-{version}-{python}-{platform.machine()}"


def ensure_wheel(package: str, version: str) -> Path:
    """The directory to put on ``sys.path``, installed when it is not there yet.

    Raises:
        WheelUnavailable: pip cannot install it.
    """
    target = cache_directory(package, version) / "site-packages"
    with locked(target.parent):
        if not target.exists():
            with replacing(target) as unfinished:
                _install(f"{package}=={version}", unfinished)
    return target


def _install(requirement: str, directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    only_this = ["--no-deps", "--only-binary=:all:", "--no-compile", "--target", str(directory)]
    patience = ["--retries", "1", "--timeout", "30"]
    done = subprocess.run(
        [*pip, *only_this, *patience, requirement], capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise WheelUnavailable(f"pip cannot install {requirement}: {reason}")


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
