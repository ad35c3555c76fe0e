"""Releases of Megatron to measure, and what was measured of each, as data of the documentation.

The data is a TOML file: version -> name -> text. A version is a release of PyPI, which may have
words behind a comma, or ``NAME=DIR``, a checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

Data = Mapping[str, Mapping[str, str]]
_FOR_NEWER_PYTHON = Version("0.17")
"""Has wheels from 3.12 on; nothing in them depends on it but the helper of data sets."""
_BUILD = (
    "import mindspeed.megatron_adaptor; from megatron.core.datasets.utils import compile_helpers; "
    "compile_helpers()"
)


@contextlib.contextmanager
def release(version: str, directory: str) -> Iterator[Path]:
    """The directory with ``megatron/core``, for as long as it is needed.

    Args:
        version: of PyPI, or the name of the column.
        directory: of a checkout; empty for the release of PyPI.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not directory:
            wanted = ["--target", folder, "--no-deps", f"megatron-core=={version}"]
            other = Version(version) >= _FOR_NEWER_PYTHON and sys.version_info < (3, 12)
            if other:
                wanted += ["--python-version", "3.12", "--only-binary", ":all:"]
                wanted += ["--ignore-requires-python"]
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
            if other:
                path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
                environment = os.environ | {"PYTHONPATH": path, "MINDSPEED_ALLOW_UNTESTED": "1"}
                subprocess.run([sys.executable, "-c", _BUILD], env=environment, check=True)
        yield Path(directory or folder).resolve()


def load(file: Path) -> dict[str, dict[str, str]]:
    """What was measured, versions in order; empty without the file."""
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def store(file: Path, head: str, data: Data) -> None:
    """Write the file: oldest version first, names of checkouts last."""
    text = head
    for version, found in sorted(data.items(), key=_order):
        text += f"\n[{json.dumps(version)}]\n"
        text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in found.items())
    file.write_text(text, encoding="utf-8")


def _order(item: tuple[str, Mapping[str, str]]) -> tuple[bool, Version, str]:
    try:
        return False, Version(item[0].partition(",")[0]), item[0]
    except InvalidVersion:
        return True, Version("0"), item[0]
