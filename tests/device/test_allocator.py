"""Settings of the caching allocator, on a device that only remembers them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from packaging.version import Version

from mindspeed.device import allocator, torch_versions
from mindspeed.device.accelerator import Accelerator, NpuDevice
from mindspeed.errors import ConfigError

EXPANDABLE = "expandable_segments:True"


def device_of(kind, initialized, changeable=True):
    """A device, and the options its allocator was given while in use."""
    given = []
    memory = SimpleNamespace(_set_allocator_settings=given.append) if changeable else object()
    module = SimpleNamespace(is_initialized=lambda: initialized, memory=memory)
    if kind == "npu":
        return NpuDevice(SimpleNamespace(npu=module)), given
    device = Accelerator.__new__(type("Xpu", (Accelerator,), {"name": "xpu"}))
    device.module = module
    return device, given


@pytest.fixture
def environment(monkeypatch):
    """Variables of the allocator; none at the beginning."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_XPU_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch_versions, "_HERE", Version("2.13"))
    return monkeypatch


@pytest.fixture(autouse=True)
def concrete(monkeypatch):
    monkeypatch.setattr(Accelerator, "__abstractmethods__", frozenset())


def variables():
    return {name: value for name, value in allocator.os.environ.items() if "ALLOC_CONF" in name}


@pytest.mark.parametrize("kind", ["npu", "xpu"])
def test_before_the_device_is_used_the_variable_is_set(environment, kind):
    device, given = device_of(kind, initialized=False)
    restore = allocator.use_expandable_segments(device)
    assert variables() == {"PYTORCH_ALLOC_CONF": EXPANDABLE}
    restore()
    assert variables() == {} and given == []


@pytest.mark.parametrize(("kind", "release"), [("npu", "2.10"), ("xpu", "2.7")])
def test_older_releases_read_the_name_of_the_device_alone(environment, kind, release):
    environment.setattr(torch_versions, "_HERE", Version(release))
    environment.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # which nobody reads
    device, _ = device_of(kind, initialized=False)
    restore = allocator.use_expandable_segments(device)
    assert variables()[f"PYTORCH_{kind.upper()}_ALLOC_CONF"] == EXPANDABLE
    restore()
    assert variables().keys() == {"PYTORCH_ALLOC_CONF"}


def test_options_of_the_user_stay(environment):
    environment.setenv("PYTORCH_XPU_ALLOC_CONF", "max_split_size_mb:64")
    device, given = device_of("xpu", initialized=True)
    restore = allocator.use_expandable_segments(device)
    both = f"max_split_size_mb:64,{EXPANDABLE}"
    assert variables() == {"PYTORCH_XPU_ALLOC_CONF": both}
    restore()
    assert variables() == {"PYTORCH_XPU_ALLOC_CONF": "max_split_size_mb:64"}
    assert given == [both, "max_split_size_mb:64,expandable_segments:False"]


def test_npu_in_use_takes_the_one_option(environment):
    environment.setenv("PYTORCH_NPU_ALLOC_CONF", "page_size:1g")
    device, given = device_of("npu", initialized=True)
    allocator.use_expandable_segments(device)()
    assert given == [EXPANDABLE, "expandable_segments:False"]


@pytest.mark.parametrize(
    ("kind", "initialized", "given", "message"),
    [
        (
            "npu", False,
            {"PYTORCH_ALLOC_CONF": EXPANDABLE, "PYTORCH_NPU_ALLOC_CONF": EXPANDABLE},
            "PYTORCH_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF are both set: unset one",
        ),
        (
            "xpu", False, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            "PYTORCH_ALLOC_CONF=expandable_segments:False switches expandable_segments off",
        ),
        (
            "npu", False, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
            "max_split_size_mb cannot be combined with expandable_segments",
        ),
        ("xpu", True, {}, "the xpu is in use, and its allocator cannot be changed any more"),
    ],
)  # fmt: skip
def test_refused(environment, kind, initialized, given, message):
    for name, value in given.items():
        environment.setenv(name, value)
    device, _ = device_of(kind, initialized, changeable=False)
    with pytest.raises(ConfigError, match=message):
        allocator.use_expandable_segments(device)
    assert variables() == given
