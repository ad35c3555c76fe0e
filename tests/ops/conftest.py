"""Fixture with the path of Triton for the tests of operators."""

from __future__ import annotations

import os

import pytest

from tests.ops import triton_jobs as jobs
from tests.support import wheels


@pytest.fixture(scope="session")
def triton() -> dict[str, str]:
    """Environment of a process that finds Triton."""
    try:
        directory = wheels.ensure_wheel("triton", jobs.TRITON)
    except wheels.WheelUnavailable as reason:
        pytest.skip(f"Triton: {reason}")
    for tool in (directory / "triton" / "backends" / "nvidia" / "bin").iterdir():
        assert os.access(tool, os.X_OK)
    return {jobs.SITE_PACKAGES: str(directory)}
