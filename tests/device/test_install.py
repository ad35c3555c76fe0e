"""Installing and undoing the CPU's torch.cuda."""

from __future__ import annotations

import pytest
import torch

from mindspeed import device
from mindspeed.journal import Journal


def _world() -> dict[tuple[str, str], object]:
    holders = {
        "torch": torch,
        "torch.cuda": torch.cuda,
        "torch.cuda.amp": torch.cuda.amp,
        "torch.cuda.graphs": torch.cuda.graphs,
        "torch.cuda.memory": torch.cuda.memory,
        "torch.cuda.nvtx": torch.cuda.nvtx,
        "torch.cuda.random": torch.cuda.random,
        "torch.cuda.streams": torch.cuda.streams,
        "torch.amp": torch.amp,
        "torch.amp.autocast_mode": torch.amp.autocast_mode,
        "autocast": torch.amp.autocast_mode.autocast,
        "torch.Tensor": torch.Tensor,
        "torch.nn.Module": torch.nn.Module,
        "torch.UntypedStorage": torch.UntypedStorage,
        "torch.TypedStorage": torch.storage.TypedStorage,
        "torch.fft": torch.fft,
        "torch.nested": torch.nested,
        "torch.serialization": torch.serialization,
        "torch.utils.data": torch.utils.data,
        "torch.distributed": torch.distributed,
        "c10d": torch.distributed.distributed_c10d,
        "device_mesh": torch.distributed.device_mesh,
        "DeviceMesh": torch.distributed.device_mesh.DeviceMesh,
    }
    return {(h, n): v for h, holder in holders.items() for n, v in vars(holder).items()}


def install_and_undo() -> tuple[int, bool, list[tuple[str, str]]]:
    """How many names change, whether undo leaves the same names, and those that differ after it."""
    before = _world()
    journal = Journal()
    device.install(journal, device.named("cpu"))
    during = _world()
    changed = sum(during[key] is not before.get(key) for key in during)
    journal.undo()
    after = _world()
    differ = [key for key in before if before[key] is not after[key]]
    return changed, before.keys() == after.keys(), differ


def test_undo_restores_identical_objects_everywhere(ranks):
    """In a fork: this process may have the adaptor already."""
    ((changed, same_names, differ),) = ranks(1, install_and_undo, backend=None)
    assert changed > 100
    assert same_names
    assert differ == []


@pytest.fixture
def cpu_world():
    journal = Journal()
    device.install(journal, device.named("cpu"))
    yield
    journal.undo()


def test_cuda_spellings_mean_the_cpu(cpu_world):
    for spelling in ("cuda", "cuda:3", torch.device("cuda", 1), torch.cuda.current_device()):
        assert torch.empty(2, device=spelling).device.type == "cpu"
        assert torch.zeros(2).to(spelling).device.type == "cpu"
