"""Deterministic computing: what is set per device, refused, and undone."""

from __future__ import annotations

import os
import types

import pytest
import torch

from mindspeed import device
from mindspeed.device.determinism import ENVIRONMENT
from mindspeed.errors import ConfigError


def _named(name):
    """A device of which only the name matters."""
    return types.SimpleNamespace(name=name)


def _settings():
    cudnn = torch.backends.cudnn
    names = {name for variables in ENVIRONMENT.values() for name in variables}
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        {name: os.environ.get(name) for name in names},
    )


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variables in ENVIRONMENT.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu"])
def test_settings_are_per_device_and_undone(name):
    before = _settings()
    undo = device.make_deterministic(True, _named(name))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    for other, variables in ENVIRONMENT.items():
        for variable, value in variables.items():
            assert os.environ.get(variable) == (value if other == name else None)
    undo()
    assert _settings() == before


def test_disabled_determinism_changes_nothing():
    before = _settings()
    device.make_deterministic(False)
    assert _settings() == before


def test_a_contradicting_environment_is_refused(monkeypatch):
    monkeypatch.setenv("HCCL_DETERMINISTIC", "false")
    before = _settings()
    with pytest.raises(ConfigError, match=r"needs HCCL_DETERMINISTIC=true, but"):
        device.make_deterministic(True, _named("npu"))
    assert _settings() == before


def test_a_deterministic_value_of_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    undo = device.make_deterministic(True, _named("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    undo()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_uninitialised_memory_is_the_same_in_every_run():
    undo = device.make_deterministic(True, device.named("cpu"))
    try:
        assert torch.empty(3).isnan().all()
    finally:
        undo()
