"""The NPU device and the additions to torch_npu's CUDA compatibility layer, on a fake torch_npu."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.device import detect, npu_shim
from mindspeed.device.accelerator import NpuDevice
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal


class _Mstx:
    def __init__(self):
        self.log = []

    def range_start(self, message, stream=None, domain="default"):
        self.log.append(f"start {message}")
        return len(self.log)

    def range_end(self, range_id, domain="default"):
        self.log.append(f"end {range_id}")

    def mark(self, message, stream=None, domain="default"):
        self.log.append(f"mark {message}")


@pytest.fixture
def torch_npu(monkeypatch):
    """A package with the names the device and the transfer layer use."""
    package = ModuleType("torch_npu")
    package.npu = SimpleNamespace(
        current_device=lambda: 3,
        device_count=lambda: 8,
        is_available=lambda: True,
        memory_allocated=lambda: 10,
        max_memory_allocated=lambda: 20,
        memory_reserved=lambda: 30,
        mem_get_info=lambda: (40, 50),
        get_device_properties=lambda index: SimpleNamespace(
            name=f"Ascend910B{index}", total_memory=50, cube_core_num=24
        ),
        mstx=_Mstx(),
        _lazy_call=lambda call: None,
    )

    class Options:
        hccl_config: dict

    package._C = SimpleNamespace(
        _distributed_c10d=SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=Options))
    )
    contrib = ModuleType("torch_npu.contrib")
    transfer = ModuleType("torch_npu.contrib.transfer_to_npu")
    for module in (package, contrib, transfer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


def test_device_memory_and_properties_are_those_of_torch_npu(torch_npu):
    here = NpuDevice(torch_npu)
    assert (here.backend, here.index(), here.count()) == ("hccl", 3, 8)
    stats = here.memory_stats()
    assert (stats.allocated, stats.peak, stats.reserved, stats.available, stats.total) == (
        *(10, 20, 30),
        *(40, 50),
    )
    assert here.properties() == device.Properties("Ascend910B3", 50, 24, None)
    assert here.has("streams")
    assert not here.has("fp64_collectives")


def test_install_completes_torch_npus_cuda_api_and_is_undone(torch_npu):
    before = {name: vars(torch.cuda).get(name) for name in ("cudart", "temperature", "check_error")}
    nvtx, all_reduce = torch.cuda.nvtx.range_push, dist.all_reduce
    journal = Journal()
    assert device.install(journal, NpuDevice(torch_npu)).name == "npu"
    assert torch.cuda.cudart().cudaProfilerStart() == 0
    assert torch.cuda.temperature() == 0
    assert torch.cuda.get_device_capability() == (8, 0)
    torch.cuda.nvtx.range_push("outer")
    with torch.cuda.nvtx.range("inner"):
        pass
    assert (torch.cuda.nvtx.range_pop(), torch.cuda.nvtx.range_pop()) == (0, -1)
    assert torch_npu.npu.mstx.log == ["start outer", "start inner", "end 2", "end 1"]
    journal.undo()
    assert {name: vars(torch.cuda).get(name) for name in before} == before
    assert torch.cuda.nvtx.range_push is nvtx
    assert dist.all_reduce is all_reduce


def test_type_strings_are_those_of_cuda_for_megatron_only(torch_npu):
    asked = npu_shim._type(lambda tensor, dtype=None: dtype or "torch.npu.HalfTensor")
    megatron = {"__name__": "megatron.core.optimizer", "asked": asked}
    assert eval("asked(None)", megatron) == "torch.cuda.HalfTensor"
    assert eval("asked(None)", {"__name__": "peft.utils", "asked": asked}) == "torch.npu.HalfTensor"
    assert asked(None, "torch.cuda.FloatTensor") == "torch.npu.FloatTensor"


def test_process_group_options_carry_name_and_buffer(torch_npu):
    options = npu_shim.process_group_options(torch_npu, "tp", 200)
    assert options.hccl_config == {"group_name": "tp", "hccl_buffer_size": 200}
    assert npu_shim.process_group_options(torch_npu).hccl_config == {}


def test_float64_sums_are_reduced_as_float32():
    calls = []

    def reduce(tensor, op, group, async_op):
        calls.append(tensor.dtype)
        tensor.mul_(2)
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    class Npu64(SimpleNamespace):
        dtype, device = torch.float64, SimpleNamespace(type="npu")

        def float(self):
            return self.value.float()

        def copy_(self, other):
            self.value.copy_(other)

    tensor = Npu64(value=torch.tensor([1.5], dtype=torch.float64))
    work = npu_shim._all_reduce(reduce)(tensor, async_op=True)
    assert tensor.value.item() == 1.5
    assert work.wait() is True
    assert tensor.value.item() == 3.0
    assert work.is_completed()
    assert calls == [torch.float32]


def test_a_missing_package_and_a_missing_toolkit_are_distinguished(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match="not installed"):
        detect.import_torch_npu()
    for message in (
        "libhccl.so: cannot open shared object file: No such file or directory",
        "libascendcl.so: cannot open shared object file",
    ):
        wrapped = RuntimeError("Failed to load the backend extension: torch_npu")
        wrapped.__cause__ = ImportError(message)
        text = detect.explain_npu_failure(wrapped)
        assert "set_env.sh" in text
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text
        assert message in text
    assert detect.explain_npu_failure(ImportError("no module named yaml")) is None


def test_an_unknown_device_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="cpu, cuda, npu"):
        device.current()


def test_detection_does_not_import_torch_npu_without_a_device_node(monkeypatch):
    monkeypatch.delenv("MINDSPEED_DEVICE", raising=False)
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(detect, "import_torch_npu", lambda: pytest.fail("imported"))
    assert detect._npu_present() is False
