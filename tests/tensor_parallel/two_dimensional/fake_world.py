"""The linear layers of one transformer layer on rank 0 of a large world, without memory or sends.

Tensors are FakeTensors and the process groups PyTorch's fake ones, so shapes, calls and bytes are
those of the real job, and the virtual clock gives a modelled time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger, Link, VirtualClock
from mindspeed.tensor_parallel.two_dimensional import grid as grids
from mindspeed.tensor_parallel.two_dimensional.cost import Widths
from mindspeed.tensor_parallel.two_dimensional.linear import GridCommunication, linear
from tests.tensor_parallel.two_dimensional.grid_ranks import PRODUCTS

Layer = tuple[tuple[int, ...], tuple[int, ...], Callable[..., torch.Tensor]]
PHASES = ("forward", "backward")


class Layout(NamedTuple):
    """A grid, sequence parallelism where x is p; flags of :class:`GridCommunication`."""

    x: int
    overlaps: tuple[str, ...] = ()


class Figures(NamedTuple):
    """Wire bytes and modelled exposed microseconds of rank 0, forward and backward."""

    bytes: tuple[int, int]
    exposed: tuple[float, float]


def figures(
    world: int, ranks: int, rows: int, widths: Widths, layouts: list[Layout]
) -> list[Figures]:
    """Run the four linear layers forward and backward in bf16, in each layout.

    Args:
        world: Number of ranks.
        ranks: Ranks p of a tensor-parallel group.
        rows: Tokens of a micro-batch, s b.
        widths: Of the layers.
        layouts: Which ones.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

    def run(layers: list[Layer], instrument: AbstractContextManager[Any]) -> Any:
        with FakeTensorMode(), instrument as found:
            for shape, matrix, function in layers:
                x, weight = (
                    torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
                    for size in (shape, matrix)
                )
                out = function(x, weight)
                out.backward(torch.empty_like(out))
        return found

    results = []
    for layout in layouts:
        layers = _layers(ranks, rows, widths, layout)
        ledger = run(layers, CommLedger())
        clock = run(layers, VirtualClock(300e12, Link(200e9, latency=10e-6)))
        waits = (clock.select("wait", phase=phase) for phase in PHASES)
        exposed = (round(1e6 * sum(wait.seconds for wait in own), 1) for own in waits)
        sent = (ledger.wire_bytes(phase=phase) for phase in PHASES)
        results.append(Figures(tuple(sent), tuple(exposed)))
    return results


def _layers(ranks: int, rows: int, widths: Widths, layout: Layout) -> list[Layer]:
    members, x = list(range(ranks)), layout.x
    if x == ranks:
        return _one_dimension(dist.new_group(members), rows, widths)
    y, h = ranks // x, widths.hidden
    over_x = dist.new_group(grids.x_groups(members, x)[0])
    over_y = dist.new_group(grids.y_groups(members, x)[0])
    options = dict.fromkeys(layout.overlaps, True)

    def on_grid(gathers: Any, scatters: Any, without: str) -> Callable[..., torch.Tensor]:
        own = {name: value for name, value in options.items() if name != without}
        communication = GridCommunication(gathers, scatters, **own)
        return lambda x, weight: linear(x, weight, None, communication, PRODUCTS)

    first = on_grid(over_x, over_y, "overlap_gather")
    second = on_grid(over_y, over_x, "overlap_scatter")
    return [
        *(((rows // x, 1, h // y), (n // x, h // y), first) for n in (widths.qkv, widths.fc1)),
        *(((rows // y, 1, n // x), (h // y, n // x), second) for n in (widths.proj, widths.fc2)),
    ]


def _one_dimension(group: Any, rows: int, widths: Widths) -> list[Layer]:
    from mindspeed.te.linear_communication import LinearCommunication
    from mindspeed.te.linear_function import linear as one_dimensional

    def of(mode: str) -> Callable[..., torch.Tensor]:
        communication = LinearCommunication(group, mode, sequence_parallel=True)
        return lambda x, weight: one_dimensional(x, weight, None, communication)

    p, h = group.size(), widths.hidden
    return [
        *(((rows // p, 1, h), (n // p, h), of("column")) for n in (widths.qkv, widths.fc1)),
        *(((rows, 1, n // p), (h, n // p), of("row")) for n in (widths.proj, widths.fc2)),
    ]
