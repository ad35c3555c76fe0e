"""Layers that a schedule stores, drops and recomputes, micro-batch by micro-batch."""

from __future__ import annotations

import pytest
import torch

from mindspeed.instruments import saved_for_backward
from mindspeed.memory.plan import SiteAction
from mindspeed.memory.scheduled import ScheduledRecomputation
from tests.memory.test_runtime import ROWS, SIZE, Layer, model, plan_of, planned

MICROBATCHES = 4
WHOLE = {"layer": SiteAction.RECOMPUTE}


def forward(layers: list[Layer], microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    x = torch.randn(ROWS, SIZE, dtype=torch.float64, generator=generator, requires_grad=True)
    hidden = x.sin()
    for layer in layers:
        hidden = layer.double()(hidden, scale=0.5)
    return x, hidden


def results(layers: list[Layer], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = [p.grad for layer in layers for p in layer.parameters()]
    return [*(x.grad for x in inputs), *weights, torch.rand(1)]


def plain(layers: list[Layer]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    passes = [forward(layers, i) for i in range(MICROBATCHES)]
    for _, output in passes:
        output.square().sum().backward()
    return results(layers, [x for x, _ in passes])


@pytest.mark.parametrize("others", [{}, {"norm": SiteAction.RECOMPUTE_OUTPUT}], ids=["", "norm"])
def test_stored_and_dropped_micro_batches_give_the_same_gradients(others):
    """0 and 3 are stored; 1 is recomputed ahead, 2 as soon as its backward asks for it."""
    expected, layers = plain(model(dropout=0.3)), model(dropout=0.3)
    runtime = planned(layers, plan_of({**WHOLE, **others}))
    schedule, figures = ScheduledRecomputation(runtime), runtime.figures
    torch.manual_seed(2)
    passes = []
    for i in range(MICROBATCHES):
        with schedule.dropped(i) if i in (1, 2) else schedule.stored():
            passes.append(forward(layers, i))
    assert runtime.plan == plan_of({**WHOLE, **others})
    assert figures.by_site()["layer"].calls == 2 * len(layers)
    schedule.recompute(1)
    ahead = figures.by_site()["layer"].reruns
    assert ahead == len(layers)
    for number, (_, output) in enumerate(passes):
        output.square().sum().backward()
        if number == 1:
            assert figures.by_site()["layer"].reruns == ahead
    assert figures.by_site()["layer"].reruns == 2 * len(layers)
    for ours, theirs in zip(results(layers, [x for x, _ in passes]), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_recomputation_brings_back_what_would_have_been_stored():
    layers = model(3, dropout=0.3)
    schedule = ScheduledRecomputation(planned(layers, plan_of(WHOLE, 3)))
    with saved_for_backward(torch.nn.ModuleList(layers).double()) as saved:
        with schedule.stored():
            stored = forward(layers, 1)
        nbytes = saved.live_bytes
        del stored
        with schedule.dropped(2):
            dropped = forward(layers, 2)
        assert saved.live_bytes == 4 * 8 * ROWS * SIZE  # three layers' inputs, and x
        schedule.recompute(2)
        assert saved.live_bytes == saved.bytes == nbytes
        dropped[1].sum().backward()
        assert saved.live_bytes == 0


def test_a_dropped_micro_batch_keeps_the_inputs_of_layers():
    layers = model(3)
    runtime = planned(layers, plan_of(WHOLE, 3))
    schedule = ScheduledRecomputation(runtime)
    with schedule.dropped("one"):
        kept = forward(layers, 1)
    assert runtime.figures.total().kept == 3 * 8 * ROWS * SIZE
    runtime.figures.reset()
    with schedule.stored():
        stored = forward(layers, 2)
    assert runtime.figures.total().calls == 0  # as without a plan
    del kept, stored
    schedule.recompute("one")
    assert runtime.figures.total().reruns == 0  # nothing is left of it
