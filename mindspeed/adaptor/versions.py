"""Which megatron-core is installed, found without importing it.

The tested release line is :data:`TESTED`; the releases beside it are only expected to work: their
patch targets are checked by ``mindspeed patches --check`` but no training is run with them.
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

TESTED = SpecifierSet(">=0.16.1,<0.17", prereleases=True)
EXPECTED = SpecifierSet(">=0.15.3,<0.18", prereleases=True)


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


def check_megatron_version(version: Version) -> None:
    """Accept tested releases, warn about expected ones, refuse all others.

    Raises:
        VersionError: outside the expected range and ``MINDSPEED_ALLOW_UNTESTED`` is not set.
    """
    if version in TESTED:
        return
    if version in EXPECTED:
        warnings.warn(
            f"megatron-core {version} is not tested with this release (tested: {TESTED}); "
            "its patch targets are checked when they are used",
            stacklevel=2,
        )
    elif not os.environ.get("MINDSPEED_ALLOW_UNTESTED"):
        raise VersionError(
            f"megatron-core {version} is outside the supported range {EXPECTED} (tested: "
            f"{TESTED}); install megatron-core 0.16.1 or set MINDSPEED_ALLOW_UNTESTED=1 to try"
        )


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
