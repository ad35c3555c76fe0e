"""Fixture with the path of Triton for the tests of operators."""

from __future__ import annotations

import os

import pytest

from tests.ops import triton_jobs as jobs
from tests.support import wheels


@pytest.fixture(scope="session")
def triton() -> dict[str, str]:
    """Environment of a process that finds Triton."""
    return environment(jobs.TRITON)


@pytest.fixture(scope="session")
def old_triton() -> dict[str, str]:
    """The same with the oldest Triton whose compiler has refused a kernel."""
    return environment(jobs.OLD_TRITON)


def environment(version: str) -> dict[str, str]:
    """The variable that names the directory of a Triton."""
    try:
        directory = wheels.ensure_wheel("triton", version)
    except wheels.WheelUnavailable as reason:
        pytest.skip(f"Triton: {reason}")
    for tool in (directory / "triton" / "backends" / "nvidia" / "bin").iterdir():
        assert os.access(tool, os.X_OK)
    return {jobs.SITE_PACKAGES: str(directory)}
