"""Installation of the wheel, and the skip reason when it is not available."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

from tests.npu_emulator import fixtures, wheel


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    return tmp_path


def pip(monkeypatch, returncode, stderr=""):
    """Stands in for pip; records its command lines."""
    calls = []

    def run(command, **_):
        calls.append(command)
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_wheel_is_installed_once_without_dependencies(cache, monkeypatch):
    calls = pip(monkeypatch, 0)
    directory = wheel.ensure_wheel()
    assert wheel.ensure_wheel() == directory
    assert directory.is_relative_to(cache / "mindspeed-tests")
    (command,) = calls
    assert command[-1] == "torch_npu==2.7.1.post11"
    assert {"--no-deps", "--target"} <= set(command)


def test_without_an_index_the_tests_skip_with_the_reason_of_pip(cache, monkeypatch):
    calls = pip(monkeypatch, 1, "WARNING: retrying\nERROR: No matching distribution found")
    with pytest.raises(pytest.skip.Exception, match="No matching distribution found"):
        fixtures.npu_pool(cache)
    with pytest.raises(wheel.WheelUnavailable):
        wheel.ensure_wheel()  # a failed installation leaves nothing behind
    assert len(calls) == 2
    assert [path.name for path in wheel.cache_directory().iterdir()] == ["lock"]


def test_another_torch_cannot_use_the_wheel(cache, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(wheel.WheelUnavailable, match=r"this is 2\.6\.0"):
        wheel.ensure_wheel()
