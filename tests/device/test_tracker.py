"""Exact bytes of live storages against known allocations."""

from __future__ import annotations

import mmap

import torch

from mindspeed import device
from mindspeed.device import host_memory
from mindspeed.journal import Journal

MIB = 1 << 20


def test_current_and_peak_follow_allocations_views_and_frees():
    with device.track_memory() as memory:
        a = torch.zeros(256, dtype=torch.float32)
        assert (memory.current, memory.peak, memory.storages) == (1024, 1024, 1)
        view = a[10:].reshape(2, -1).t()
        assert memory.current == 1024
        b = a.double()
        assert (memory.current, memory.storages) == (1024 + 2048, 2)
        del a
        assert memory.current == 1024 + 2048
        del view
        assert (memory.current, memory.peak) == (2048, 3072)
        small = torch.zeros(2)
        assert (memory.current, memory.peak) == (2056, 3072)
        del small
        memory.reset_peak()
        assert memory.peak == 2048
        del b
    assert (memory.current, memory.storages) == (0, 0)


def test_the_saved_activations_of_a_forward_are_freed_by_the_backward():
    x = torch.ones(1000, requires_grad=True)
    with device.track_memory(x) as memory:
        assert memory.current == 4000
        y = x.exp()
        z = y.sin()
        del y
        assert memory.current == 3 * 4000
        z.sum().backward()
        del z
        assert memory.current == 2 * 4000  # x and its gradient
        assert x.grad is not None
        # x, its gradient, z, what sin saved, and one temporary of sin's backward at most
        assert 4 * 4000 <= memory.peak <= 6 * 4000


def test_a_resized_storage_counts_with_its_new_size_at_once():
    with device.track_memory() as memory:
        a = torch.zeros(1000)
        a.untyped_storage().resize_(0)
        assert memory.current == 0
        a.untyped_storage().resize_(8000)
        assert (memory.current, memory.peak, memory.storages) == (8000, 8000, 1)


def test_modules_are_tracked_from_construction_with_buffers_and_gradients():
    module = torch.nn.BatchNorm1d(10)
    module.weight.grad = torch.zeros(10)
    expected = 4 * (10 + 10 + 10 + 10 + 10) + 8  # weight, bias, mean, var, grad; step counter
    assert device.track_memory(module).current == expected


def test_torch_cuda_reports_the_tracker_inside_and_the_process_outside():
    journal = Journal()
    device.install(journal, device.named("cpu"))
    try:
        outside = torch.cuda.memory_allocated()
        assert outside > 64 * MIB  # an interpreter with torch
        with device.track_memory():
            keep = torch.zeros(MIB, dtype=torch.uint8)
            temporary = torch.zeros(2 * MIB, dtype=torch.uint8)
            del temporary
            assert torch.cuda.memory_allocated() == MIB
            assert torch.cuda.max_memory_allocated() == 3 * MIB
            stats = torch.cuda.memory_stats()
            assert stats["allocated_bytes.all.current"] == MIB
            assert stats["allocated_bytes.all.peak"] == 3 * MIB
            assert stats["allocation.all.current"] == 1
            assert torch.cuda.memory.memory_allocated() == MIB
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == MIB
            del keep
        nested = torch.cuda.memory.memory_stats_as_nested_dict()
        assert nested["num_alloc_retries"] == 0
        assert nested["reserved_bytes"]["all"]["peak"] >= nested["reserved_bytes"]["all"]["current"]
    finally:
        journal.undo()


def test_the_resident_set_and_its_peak_follow_a_large_allocation():
    if not host_memory.reset_peak():
        return
    before = host_memory.resident()
    with mmap.mmap(-1, 64 * MIB) as block:  # malloc may hand out pages that are resident already
        for page in range(0, 64 * MIB, mmap.PAGESIZE):
            block[page] = 1
        assert host_memory.resident() - before > 48 * MIB
    assert host_memory.peak_resident() - before > 48 * MIB
    assert host_memory.total() >= host_memory.available() > 0
