"""Host copies: blocks, streams and events, the order of copies back, in-place changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mindspeed.memory import host_pool
from mindspeed.memory.figures import SiteFigures
from mindspeed.memory.host_copy import OffloadedCopy, OnHost, elements_of
from mindspeed.memory.host_pool import HostPool, size_class
from mindspeed.memory.offload import Offload
from mindspeed.memory.plan import ChunkPlan, SiteAction
from mindspeed.memory.runtime import Runtime
from mindspeed.memory.saved import InPlaceChange
from tests.memory.fake_device import FakeDevice, Races, Stream
from tests.memory.test_runtime import Layer, model, plan_of, planned, step

ROWS, SIZE = 6, 8


def saved(engine: Offload, x: torch.Tensor, layer: str = "0") -> OnHost:
    group = engine.begin(0, layer)
    copy = engine.save(x, group, f"{layer}, site", SiteFigures())
    engine.end(group)
    return OnHost(copy, x)


def swapped(device: FakeDevice, count: int = 3, **options) -> tuple[list[Layer], Runtime]:
    """Layers whose saved tensors all go to the host."""
    layers = model(count)
    runtime = planned(layers, plan_of({"layer": SiteAction.OFFLOAD}, count))
    runtime.offload = Offload(device, min_bytes=0, **options)
    return layers, runtime


# Memory of the host


def test_size_classes_waste_an_eighth_at_most():
    for nbytes in [*range(1, 5000), *(2**k + d for k in range(13, 31) for d in (-1, 0, 1))]:
        size = size_class(nbytes)
        assert nbytes <= size <= max(nbytes * 9 / 8, nbytes + host_pool.ALIGNMENT)
        assert size % host_pool.ALIGNMENT == 0
        assert size_class(size) == size


def test_blocks_return_to_the_pool_with_their_last_event():
    pool = HostPool(pinned=False, slab=4096)
    first = pool.take(1000)
    address, first.read = first.memory.data_ptr(), "event"
    assert (first.memory.numel(), pool.used, pool.slabs) == (1000, 1024, 1)
    del first
    again, other = pool.take(1020), pool.take(1020)
    assert (again.memory.data_ptr(), again.read) == (address, "event")
    assert other.memory.data_ptr() - address == 1024 and other.read is None
    large = pool.take(5000)
    assert (pool.slabs, pool.reserved, large.memory.numel()) == (2, 4096 + 8192, 5000)


def test_after_one_step_nothing_is_allocated_on_the_host():
    layers, runtime = swapped(FakeDevice())
    step(layers)
    pool = runtime.offload.pool
    before = pool.slabs, pool.reserved
    assert pool.slabs == 1
    for _ in range(3):
        step(layers)
        assert (pool.slabs, pool.reserved) == before
        assert (pool.used, runtime.offload.live) == (0, 0)


# One copy


GEOMETRIES = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "slice of the last dimension": lambda x: x[..., 2:5],
    "every other row": lambda x: x[::2],
    "one element": lambda x: x[:1, :1],
    "scalar": lambda x: x[0, 0, 0],
    "expanded dimension of size one": lambda x: x[:1].expand(1, 6, 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_tensor_comes_back_as_it_was(geometry, dtype):
    x = GEOMETRIES[geometry](torch.arange(4 * 6 * 8).view(4, 6, 8).remainder(7).to(dtype))
    held = saved(Offload(FakeDevice(), min_bytes=0), x)
    back = held.get()
    assert torch.equal(back, x) and back.dtype == dtype
    assert back.stride() == x.stride()  # a product may sum in the order of strides
    assert held.copy.nbytes == x.numel() * x.element_size()  # without the gaps of a slice


@pytest.mark.parametrize("complete", [True, False], ids=["on the host", "still there"])
def test_views_of_the_same_elements_share_a_copy(complete):
    device = FakeDevice()
    device.complete = complete
    x = torch.arange(48.0).view(4, 12)
    views = [x, x.t(), x.view(2, 2, 12), x.flatten()]
    assert len({elements_of(view) for view in views}) == 1
    copy = saved(Offload(device, min_bytes=0), x).copy
    for view in views:
        back = OnHost(copy, view).get()
        assert torch.equal(back, view) and back.stride() == view.stride()
    others = [x[1:], x[:3], x[:, 1:], x[:, :11], x.view(torch.int32)]
    assert len({elements_of(view) for view in [x, *others]}) == 6


def test_a_slice_that_is_still_there_is_used_as_it_is():
    device = FakeDevice()
    device.complete = False
    x = torch.arange(48.0).view(4, 12)[:, 3:6]
    back = saved(Offload(device, min_bytes=0), x).get()
    assert torch.equal(back, x) and back.stride() == x.stride()


def test_what_is_not_worth_a_copy_or_cannot_be_copied_stays():
    engine = Offload(FakeDevice(), min_bytes=64)
    x = torch.ones(16, requires_grad=True)
    y = x * 2
    assert engine.takes(y)
    assert not engine.takes(x)  # a leaf
    assert not engine.takes(y[:15])  # small
    assert not engine.takes(y.detach())  # a mask or a table
    assert not engine.takes(y.expand(3, 16))  # repeats elements
    assert not engine.takes(y.to("meta"))  # not on the device
    assert not Offload(FakeDevice(), min_bytes=0).takes(y[:0])


def test_the_tensor_on_the_device_lives_until_its_copy_is_complete():
    device = FakeDevice()
    engine = Offload(device, min_bytes=0)
    device.complete = False
    x = torch.ones(16)
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    copy = saved(engine, x)
    del x
    engine.poll()
    assert not storage.expired()
    device.complete = True
    engine.poll()
    assert storage.expired()
    assert torch.equal(copy.get(), torch.ones(16))


def test_a_tensor_whose_copy_is_not_complete_is_used_as_it_is():
    device = FakeDevice()
    device.complete = False
    engine = Offload(device, min_bytes=0)
    x = torch.ones(16)
    copy = saved(engine, x)
    assert copy.get().data_ptr() == x.data_ptr()
    device.complete = True
    engine.poll()
    assert copy.get().data_ptr() == x.data_ptr()


@pytest.mark.parametrize("complete", [True, False], ids=["released", "still there"])
def test_a_change_before_the_copy_is_complete_is_refused(complete):
    device = FakeDevice()
    device.complete = False
    engine = Offload(device, min_bytes=0)
    x = torch.ones(4, 5)
    copy = saved(engine, x)
    x.add_(1)
    device.complete = complete
    engine.poll()
    with pytest.raises(InPlaceChange, match=r"0, site: .*\(4, 5\)"):
        copy.get()


def test_a_change_after_the_copy_is_complete_does_no_harm():
    class Careless(Layer):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            hidden = self.norm(x)
            out = self.first(hidden)
            hidden.zero_()
            return out

    layer = Careless()
    runtime = planned([layer], plan_of({"first": SiteAction.OFFLOAD}, 1))
    x = torch.randn(ROWS, SIZE)
    out = layer(x)
    assert runtime.offload.live == 1
    out.sum().backward()
    expected = layer.norm(x).sum(0).expand(16, SIZE)
    assert torch.allclose(layer.first.weight.grad, expected, atol=1e-6)


# Streams and events


@pytest.mark.parametrize("complete", [True, False, None], ids=["at once", "never", "in backward"])
def test_no_two_accesses_of_the_same_bytes_are_without_order(complete):
    device = FakeDevice()
    expected = step(model(3))
    layers, runtime = swapped(device)
    with Races(device) as races:
        for _ in range(2):
            device.complete = bool(complete)
            for layer in layers:
                layer.zero_grad()
            torch.manual_seed(2)
            x = torch.randn(ROWS, SIZE, dtype=torch.float64, requires_grad=True)
            hidden = x.sin()
            for layer in layers:
                hidden = layer.double()(hidden, scale=0.5)
            device.complete = complete is not False
            hidden.square().sum().backward()
    assert races.found == []
    assert torch.equal(x.grad, expected[1])
    total = runtime.figures.total()
    assert total.copied_out > 0
    assert total.copied_in == (0 if complete is False else total.copied_out)


@pytest.mark.parametrize(
    ("waiting", "awaited"), [("out", "compute"), ("back", "compute"), ("compute", "back")]
)
def test_a_missing_wait_is_found(waiting, awaited, monkeypatch):
    ignore_waits(waiting, awaited, monkeypatch)
    device = FakeDevice()
    layers, _ = swapped(device)
    with Races(device) as races:
        for _ in range(2):
            step(layers)
    assert {(waiting, awaited), (awaited, waiting)} & {
        (one.stream, other.stream) for one, other in races.found
    }


@pytest.mark.parametrize("waits", [True, False])
def test_host_memory_is_read_before_it_is_written_again(waits, monkeypatch):
    """Also where another stream computes, which has not waited for the copy back."""
    if not waits:
        ignore_waits("out", "back", monkeypatch)
    device = FakeDevice()
    engine = Offload(device, min_bytes=0)
    with Races(device) as races:
        saved(engine, torch.ones(16)).get()
        with device.use_stream(Stream("another")):
            saved(engine, torch.zeros(16))
    assert engine.pool.slabs == 1
    assert (races.found == []) == waits


def test_a_copy_back_that_nobody_used_is_over_before_its_memory_is_used_again():
    device = FakeDevice()
    engine = Offload(device, min_bytes=0)
    with Races(device):
        copy = saved(engine, torch.ones(16))
        copy.copy.start()
        before = device.compute.clock["back"]
        del copy
    assert device.compute.clock["back"] > before


def ignore_waits(waiting: str, awaited: str, monkeypatch) -> None:
    """A stream no longer waits for another one."""

    def without(method):
        def wait(self, other):
            time = self.clock[awaited]
            method(self, other)
            if self.name == waiting:
                self.clock[awaited] = time

        return wait

    for name in ("wait_event", "wait_stream"):
        monkeypatch.setattr(Stream, name, without(getattr(Stream, name)))


# Order


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What happens in backward: layers whose backward begins, copies of layers that start."""
    events: list[str] = []
    layer_of = weakref.WeakKeyDictionary()
    save, start, reach = Offload.save, OffloadedCopy.start, Offload.reach

    def logged_save(engine, tensor, group, where, figures):
        copy = save(engine, tensor, group, where, figures)
        layer_of[copy] = group.key[1]
        return copy

    def logged_start(copy):
        if copy.waits:
            events.append(layer_of[copy])
        start(copy)

    def logged_reach(engine, group):
        if not group.reached:
            events.append(f"backward {group.key[1]}")
        reach(engine, group)

    monkeypatch.setattr(Offload, "save", logged_save)
    monkeypatch.setattr(OffloadedCopy, "start", logged_start)
    monkeypatch.setattr(Offload, "reach", logged_reach)
    return events


def forward(layers, rows: int = ROWS) -> torch.Tensor:
    x = torch.randn(rows, SIZE, requires_grad=True).sin()
    for layer in layers:
        x = layer(x)
    return x.sum()


def distinct(events: list[str]) -> list[str]:
    """Each event once for its run of equal ones."""
    return [name for i, name in enumerate(events) if events[i - 1 : i] != [name]]


def test_the_copies_of_a_layer_start_when_the_backward_of_the_one_after_it_begins(log):
    layers, _ = swapped(FakeDevice())
    forward(layers).backward()
    assert distinct(log) == ["backward 2", "2", "1", "backward 1", "0", "backward 0"]


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, ["2", "1"]),
        ({"prefetch_groups": 2}, ["2", "1", "0"]),
        ({"prefetch_groups": 2, "prefetch_bytes": 0}, ["2"]),
        ({"prefetch_groups": 0}, ["2"]),
    ],
)
def test_prefetch_is_bounded_by_bytes_and_layers(options, ahead, log):
    layers, _ = swapped(FakeDevice(), **options)
    forward(layers).backward()
    assert distinct(log[1 : log.index("backward 1")]) == ahead


def test_the_order_of_a_pipeline_schedule_is_learned(log):
    """1F1B with two micro-batches in flight: after the first layer of one, the last of the next."""
    layers, runtime = swapped(FakeDevice(), 2)
    one = ["backward 1", "1", "0", "backward 0"]
    ahead = ["backward 1", "0", "backward 0"]

    def run() -> list[str]:
        log.clear()
        losses = [forward(layers), forward(layers)]
        losses[0].backward()
        losses.append(forward(layers))
        losses[1].backward()
        losses[2].backward()
        assert runtime.offload.live == 0
        return distinct(log)

    assert run() == [*one, *one, *one]
    for _ in range(2):
        assert run() == [*one, "1", *ahead, "1", *ahead]


@pytest.mark.slow
def test_a_graph_that_is_dropped_leaves_nothing():
    layers, runtime = swapped(FakeDevice())
    forward(layers)
    gc.collect()
    assert (runtime.offload.live, runtime.offload.pool.used) == (0, 0)


def test_the_largest_layer_call_is_checked():
    seen: list[int] = []
    layers, _ = swapped(FakeDevice(), check=seen.append)
    forward(layers)
    forward(layers, 2 * ROWS)
    assert len(seen) == 2 and seen[1] == 2 * seen[0] > 0


def test_plans_without_offload_make_no_groups():
    layers = model(2)
    runtime = planned(layers, plan_of({"layer": SiteAction.RECOMPUTE}))
    step(layers)
    assert runtime.offload.pool.slabs == 0
    assert not runtime.offload._calls


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gradients_on_a_gpu_are_those_without_a_plan():
    """Large enough that copies and kernels overlap; memory is reused between the steps."""
    from mindspeed import device

    def run(plan: ChunkPlan) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layers = [Layer().cuda() for _ in range(6)]
        runtime = planned(layers, plan)
        for _ in range(4):
            x = torch.randn(1 << 18, SIZE, device="cuda", requires_grad=True).sin()
            for layer in layers:
                x = layer(x)
            x.sum().backward()
        torch.cuda.synchronize()
        runtime.offload.poll()
        assert runtime.offload.live == 0
        grads = [p.grad for layer in layers for p in layer.parameters()]
        return grads, runtime.figures.total().copied_out

    assert device.current().name == "cuda"
    expected, _ = run(ChunkPlan())
    found, copied = run(plan_of({"layer": SiteAction.OFFLOAD}, 6))
    assert copied > 0
    assert all(map(torch.equal, found, expected))
