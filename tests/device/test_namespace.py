"""torch.cuda, device arguments, streams, random states and autocast on the CPU."""

from __future__ import annotations

import time
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

from mindspeed import device
from mindspeed.device.torch_cuda_shim import callers, namespace
from mindspeed.journal import Journal

KEPT = {
    # classes and errors that exist without a GPU
    *("AcceleratorError", "CudaError", "DeferredCudaCallError", "OutOfMemoryError", "GreenContext"),
    *("CUDAPluggableAllocator", "cudaStatus", "Device", "classproperty"),
    # questions about the build of torch: the truth for everybody
    *("get_arch_list", "get_gencode_flags", "get_allocator_backend", "is_tf32_supported"),
    *("has_half", "has_magma", "get_sync_debug_mode", "set_sync_debug_mode"),
    # nothing that Megatron calls and a CPU could answer
    *("current_blas_handle", "current_solver_handle", "list_gpu_processes", "cast"),
    *("change_current_allocator", "caching_allocator_enable", "caching_allocator_disabled"),
    *("get_per_process_memory_fraction", "set_per_process_memory_fraction"),
    *("host_memory_stats", "host_memory_stats_as_nested_dict"),
    *("reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats"),
}

_FOREIGN = ("mindspeed", "typing", "functools", "collections")


@pytest.fixture(autouse=True)
def cpu_world(monkeypatch):
    monkeypatch.setattr(callers, "_roots", {*callers._roots, __name__.partition(".")[0]})
    monkeypatch.setattr(callers, "_known", {})
    journal = Journal()
    device.install(journal, device.named("cpu"))
    yield
    journal.undo()


def test_every_public_name_of_torch_cuda_is_provided_or_deliberately_kept():
    def public(name, value):
        typed = name.endswith(("Tensor", "Storage"))
        return not name.startswith("_") and callable(value) and not typed

    unknown = {
        name
        for name, value in vars(torch.cuda).items()
        if public(name, value)
        and not isinstance(value, ModuleType)
        and not getattr(value, "__module__", "").startswith(_FOREIGN)
        and name not in namespace.FUNCTIONS
    }
    assert unknown - KEPT == set()


@pytest.mark.parametrize("spelling", ["cuda", "cuda:3", torch.device("cuda", 1), 0])
def test_every_cuda_device_spelling_means_the_cpu(spelling, tmp_path):
    tensors = [
        torch.empty(2, device=spelling),
        torch.zeros_like(torch.ones(2), device=spelling, pin_memory=False),
        torch.ones(2).new_zeros(2, device=spelling),
        torch.ones(2).to(spelling),
        torch.ones(2).to(spelling, torch.float16, non_blocking=True),
        torch.ones(2).to(device=spelling),
        torch.ones(2).cuda(spelling),
        torch.fft.fftfreq(2, device=spelling),
        torch.tensor([1], device=spelling),
        torch.nn.Linear(2, 2).to(spelling).weight,
        torch.ones(1, device=torch._C._nn._parse_to(spelling)[0]),  # asked by tensordict
        torch.nn.Linear(2, 2, device="meta").to_empty(device=spelling).weight,
        torch.nn.Linear(2, 2).cuda(spelling).weight,
        torch.empty(2, pin_memory=True).pin_memory(),
    ]
    torch.save(torch.ones(2), tmp_path / "x.pt")
    tensors.append(torch.load(tmp_path / "x.pt", map_location=spelling))
    if not isinstance(spelling, int):
        with torch.device(spelling):
            tensors.append(torch.empty(2))
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_other_devices_are_unchanged():
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    with pytest.raises(NotImplementedError):
        torch.empty(2, device="meta").cuda()


def test_the_typed_constructors_make_tensors_of_their_type():
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.cuda.HalfTensor(2, 3).shape == (2, 3)
    assert torch.ones(2).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.ones(2).type(torch.cuda.LongTensor).dtype == torch.int64


def test_the_device_index_is_kept_without_effect():
    torch.cuda.set_device(3)
    assert torch.cuda.current_device() == 3
    assert torch.device("cuda", torch.cuda.current_device()).index == 3
    assert device.named("cpu").index() == 3
    torch.cuda.set_device("cuda:0")
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 0


def test_the_innermost_stream_is_current():
    default = torch.cuda.current_stream()
    one, two = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(one):
        assert torch.cuda.current_stream() is one
        with torch.cuda.stream(None), two:
            assert torch.cuda.current_stream() is two
        one.wait_stream(default)
        torch.ones(1).record_stream(one)
    assert torch.cuda.current_stream() is default is torch.cuda.default_stream()
    assert one.cuda_stream != two.cuda_stream


def test_events_measure_time_under_the_rules_of_a_gpu():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    before = time.perf_counter()
    while time.perf_counter() - before < 0.002:
        pass
    end.record()
    assert start.elapsed_time(end) >= 2
    assert end.query()
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_graphs_and_memory_pools_say_which_flag_to_remove():
    with pytest.raises(RuntimeError, match="--cuda-graph-impl"), torch.cuda.graph(None):
        pass
    with pytest.raises(RuntimeError, match="--cuda-graph-impl"):
        torch.cuda.CUDAGraph().capture_begin()
    with pytest.raises(RuntimeError, match="--use-nccl-ub"):
        torch.cuda.MemPool()
    assert not isinstance(None, torch.cuda.MemPool)
    assert torch.cuda.is_current_stream_capturing() is False


def test_the_device_generator_is_separate_from_the_host_generator():
    torch.manual_seed(1)  # seeds both, as on a GPU
    host = torch.get_rng_state()
    assert torch.equal(torch.cuda.get_rng_state(), host)
    torch.cuda.manual_seed(7)
    assert torch.cuda.initial_seed() == 7
    assert torch.equal(torch.get_rng_state(), host)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, generator=torch.cuda.default_generators[0])
    assert not torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, generator=torch.cuda.default_generators[0]), drawn)
    assert torch.equal(torch.get_rng_state(), host)
    seeded = torch.Generator(device="cuda").manual_seed(7)
    assert isinstance(seeded, torch.Generator)
    assert torch.equal(torch.rand(3, generator=seeded, device="cuda"), drawn)


def test_data_loaders_do_not_draw_from_the_host_generator():
    before = torch.get_rng_state()
    batches = list(DataLoader(list(range(8)), shuffle=True, batch_size=4))
    assert sorted(torch.cat(batches).tolist()) == list(range(8))
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_for_cuda_casts_on_the_cpu_in_forward_and_backward():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            seen.append((torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()))
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            seen.append((torch.is_autocast_enabled(), (x @ w).dtype))
            return grad @ w.t(), x.t() @ grad

    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = Double.apply(x, w)
        assert y.dtype == torch.bfloat16
    assert torch.is_autocast_enabled() is False
    y.float().sum().backward()
    assert seen == [(True, torch.bfloat16), (True, torch.bfloat16)]


def test_capabilities_properties_and_nvtx_answer():
    assert torch.cuda.get_device_capability() == (8, 0)
    known = torch.cuda.get_device_properties(0)
    available, total = torch.cuda.mem_get_info()
    assert 0 < available <= total == known.total_memory
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("x"):
        assert torch.cuda.cudart().cudaProfilerStart() == 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_the_cpu_device_answers_the_accelerator_api():
    here = device.named("cpu")
    assert (here.name, here.backend, here.torch_device(3)) == ("cpu", "gloo", torch.device("cpu"))
    stream = here.stream()
    with here.use_stream(stream):
        assert here.current_stream() is stream
    first, second = here.event(timing=True), here.event(timing=True)
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0
    assert here.generator() is torch.default_generator
    stats = here.memory_stats()
    assert 0 < stats.allocated <= stats.peak
    assert here.properties().peak_flops is None
    assert here.has("fp64_collectives")
    assert not here.has("graphs")
    with pytest.raises(ValueError, match="known are"):
        here.has("teleport")
