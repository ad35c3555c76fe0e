"""What test_library_device.py runs: the library's device layer on an emulated NPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def figures() -> dict[str, Any]:
    from mindspeed import device

    here = device.current()
    here.set_index(1)
    x = torch.ones(1 << 18, device=here.torch_device())
    stream, event = here.stream(), here.event(timing=True)
    with here.use_stream(stream):
        x.add_(1)
        event.record()
    event.synchronize()
    here.generator().manual_seed(5)
    first = torch.rand(2, device=here.torch_device()).tolist()
    here.generator(1).manual_seed(5)
    here.synchronize()
    memory, properties = here.memory_stats(), here.properties()
    del x
    here.empty_cache()
    here.reset_peak_memory()
    after = here.memory_stats()
    return {
        "who": (here.name, here.backend, here.index(), here.count()),
        "repeats": first == torch.rand(2, device=here.torch_device()).tolist(),
        "inside": here.current_stream() != stream,
        "memory": (memory.allocated, memory.peak, memory.reserved, memory.available, memory.total),
        "after": (after.allocated, after.peak, after.reserved),
        "properties": (properties.name, properties.total_memory, properties.cores),
    }


def cuda_names() -> dict[str, Any]:
    """What Megatron's torch.cuda calls give once the device layer is installed."""
    from mindspeed import device
    from mindspeed.journal import Journal

    journal = Journal()
    device.install(journal)
    x = torch.ones(2).half().cuda()
    asked = {"__name__": "megatron.core.optimizer", "x": x, "torch": torch}
    with torch.cuda.nvtx.range("inner"):
        torch.cuda.nvtx.range_push("outer")
        torch.cuda.nvtx.range_pop()
    found = {
        "device": x.device.type,
        "is_cuda": x.is_cuda,
        "type for Megatron": eval("x.type()", asked),
        "type": x.type(),
        "converted": x.type("torch.cuda.FloatTensor").dtype,
        "current": torch.cuda.current_device(),
        "capability": torch.cuda.get_device_capability(),
        "compiled for Megatron": not eval("torch.compile(sorted) is sorted", asked),
        "profiler": torch.cuda.cudart().cudaProfilerStart(),
        "memory": torch.cuda.memory_allocated() > 0,
        "state": torch.cuda.get_rng_state().dtype,
        "generators": len(torch.cuda.default_generators),
    }
    found["events"] = torch.cuda.Event(enable_timing=True).query()
    journal.undo()
    found["after undo"] = eval("x.type()", asked)
    return found


def sums_in_float64() -> list[Any]:
    from mindspeed import device
    from mindspeed.journal import Journal

    device.install(Journal())
    dist.init_process_group("nccl")
    value = torch.tensor([1.5 + dist.get_rank()], dtype=torch.float64, device="cuda")
    dist.all_reduce(value)
    later = torch.tensor([1.5 + dist.get_rank()], dtype=torch.float64, device="cuda")
    dist.all_reduce(later, async_op=True).wait()
    return [dist.get_backend(), value.dtype, value.item(), later.item()]


def options_of_groups() -> tuple[dict[str, Any], list[Any]]:
    """A group with our options, and Megatron's way of making groups."""
    from mindspeed import device
    from mindspeed.device import npu_shim
    from mindspeed.journal import Journal

    here = device.install(Journal())
    dist.init_process_group("nccl")
    options = npu_shim.process_group_options(here.torch_npu, "tp", 200)
    group = dist.new_group([0, 1], backend="nccl", pg_options=options)
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x, group=group)
    return options.hccl_config, [dist.get_backend(group), x.tolist()]


def host_copies() -> dict[str, Any]:
    """A saved tensor goes to pinned host memory and comes back, on streams of its own."""
    from mindspeed.memory.figures import SiteFigures
    from mindspeed.memory.host_copy import OnHost
    from mindspeed.memory.offload import Offload

    engine, figures = Offload(min_bytes=0), SiteFigures()
    weight = torch.ones(4, 6, device="npu", requires_grad=True)
    saved = (weight * torch.arange(6.0, device="npu")).t()
    group = engine.begin(0, "layer")
    taken = engine.takes(saved), engine.takes(saved.detach().cpu())
    held = OnHost(engine.save(saved, group, "layer, site", figures), saved)
    held.copy.written.synchronize()  # a tensor whose copy is not complete does not need it
    engine.end(group)
    back = held.get()
    return {
        "taken": taken,
        "pinned": held.copy._host.is_pinned(),
        "device": back.device.type,
        "equal": torch.equal(back, saved),
        "strides": back.stride(),
        "bytes": (figures.copied_out, figures.copied_in),
    }
