"""The installed release of megatron-core, found without importing it.

Only releases that trainings are tested with (:data:`TESTED`, the table of
``tools/megatron_versions.py``) and later patches of them are accepted. The contract of every patch
can be checked against any other (``mindspeed patches --check``), but a contract that holds does not
mean that a training runs. The modules of this package hold what differs between releases and is no
patch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mindspeed.errors import VersionError

TESTED = ("0.12.1", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0")
"""Releases, in order."""


def megatron_root() -> Path | None:
    """The directory that holds ``megatron/core``, or None when Megatron is not installed."""
    spec = _find_spec("megatron.core")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parents[2]


def has_megatron_training() -> bool:
    """Whether a Megatron-LM checkout is on the path (the wheel has ``megatron.core`` only)."""
    return _find_spec("megatron.training") is not None


def read_version(root: Path) -> Version:
    """The megatron-core version of the tree below ``root``, read from its ``package_info.py``.

    Raises:
        VersionError: the file is missing or has no version numbers.
    """
    info = root / "megatron" / "core" / "package_info.py"
    try:
        text = info.read_text()
        parts = [
            re.search(rf"^{name}\s*=\s*['\"]?([^'\"\n#]*)", text, re.M).group(1).strip()  # type: ignore[union-attr]
            for name in ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")
        ]
    except (OSError, AttributeError) as error:
        raise VersionError(f"{info} does not tell a megatron-core version: {error}") from error
    return Version(".".join(parts[:3]) + parts[3])


@lru_cache(maxsize=1)
def megatron_version() -> Version | None:
    """The installed megatron-core version, or None when it is not installed."""
    root = megatron_root()
    return read_version(root) if root else None


def in_range(version: Version | str, versions: str) -> bool:
    """Whether a version is in a range such as ``>=0.16,<0.18``, candidates too; ``""`` has all."""
    return SpecifierSet(versions, prereleases=True).contains(version)


def is_tested(version: Version) -> bool:
    """Whether it is a tested release, or a later patch of one."""
    return any(in_range(version, f"~={release}") for release in TESTED)


def at_least(version: str) -> bool:
    """Whether the installed megatron-core is this release, a candidate of it, or a later one."""
    installed = megatron_version()
    return installed is not None and installed.release >= Version(version).release


def check_megatron_version(version: Version) -> None:
    """Accept tested releases and refuse all others.

    Raises:
        VersionError: outside the tested range and ``MINDSPEED_ALLOW_UNTESTED`` is not set.
    """
    if is_tested(version):
        return
    tested = ", ".join(TESTED)
    if not os.environ.get("MINDSPEED_ALLOW_UNTESTED"):
        raise VersionError(
            f"megatron-core {version} is not supported: trainings are tested with {tested}; "
            'run pip install "megatron-core==0.16.1", or set MINDSPEED_ALLOW_UNTESTED=1 to try'
        )
    warnings.warn(
        f"megatron-core {version} is not supported (tested: {tested}); "
        "MINDSPEED_ALLOW_UNTESTED=1 tries it",
        stacklevel=2,
    )


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
