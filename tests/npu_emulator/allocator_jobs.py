"""What test_allocator.py runs on an emulated NPU, with torch_npu's own caching allocator."""

from __future__ import annotations

import os

import torch

MIB = 2**20


def long_lived_and_short_lived():
    """Segments before and after activations are freed, with and without the pool of the feature."""
    from mindspeed import device
    from mindspeed.memory.fragmentation import LongLivedPool

    here = device.current()
    found = {}
    for name in ("plain", "pools"):
        torch.npu.empty_cache()
        pool = LongLivedPool(here.memory_pool()) if name == "pools" else None
        found[name] = _train(pool)
    return found


def _train(pool):
    """(reserved bytes, reserved bytes once activations are freed and the cache is emptied)."""
    if pool is not None:
        pool.before_model({})
    state = torch.empty(3 * MIB, dtype=torch.uint8, device="npu")
    if pool is not None:
        pool.with_optimizer(torch.optim.SGD([state.float().requires_grad_()]))
    activation = torch.empty(8 * MIB, dtype=torch.uint8, device="npu")
    reserved = torch.npu.memory_reserved()
    del activation
    torch.npu.empty_cache()
    after = torch.npu.memory_reserved()
    del state
    return reserved, after


def refused():
    """Give the allocator another value than those of the setting, as the library gives it."""
    from mindspeed.device.torch_versions import allocator_variables

    os.environ[allocator_variables("npu")[0]] = "expandable_segments:perhaps"
    torch.empty(1, device="npu")


def expandable(initialized):
    """Segments that torch_npu reports, and the variable with the setting and after it."""
    from mindspeed import device
    from mindspeed.device import allocator
    from mindspeed.device.torch_versions import allocator_variables

    if initialized:
        torch.empty(1, device="npu")
    restore = allocator.use_expandable_segments(device.current())
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
    segments = torch.npu.memory_snapshot()
    found = [s.get("is_expandable") for s in segments if s["total_size"] >= x.nbytes]
    (name, *_) = allocator_variables("npu")
    variable = os.environ.get(name)
    restore()
    return found, variable, os.environ.get(name)
