"""One rank of a fake process group of 8, on tensors without memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed.instruments import CommLedger, Link, VirtualClock

FLOPS_PER_SECOND, LINK = 300e12, Link(200e9, latency=10e-6)
RANKS = 8


class Figures(NamedTuple):
    """Of one configuration: calls, bytes sent, and seconds by the virtual clock."""

    calls: int
    sent: int
    exposed: float
    total: float


def _start() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


def _measure(run: Any) -> Figures:
    with CommLedger() as ledger, VirtualClock(FLOPS_PER_SECOND, LINK) as clock:
        run()
    return Figures(len(ledger.events), ledger.wire_bytes(), clock.exposed, clock.now)


def one_product(m: int, k: int, n: int, parts: list[int]) -> list[Figures]:
    """``matmul_scatter`` of a layer in each number of parts."""
    from mindspeed.te import kernels
    from mindspeed.tensor_parallel.products import OverlappedProducts
    from mindspeed.tensor_parallel.strategy import OPERATIONS, Overlap

    _start()
    plain = {name: getattr(kernels, name) for name in OPERATIONS}
    x = torch.empty(m, 1, k, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(n, k, device="meta", dtype=torch.bfloat16)
    found = []
    for number in parts:
        products = OverlappedProducts(Overlap(parts=number), plain)
        found.append(_measure(lambda p=products: p.matmul_scatter(x, weight, dist.group.WORLD)))
    return found


def one_layer(
    sizes: dict[str, int], configurations: list[tuple[dict[str, Any], bool]]
) -> list[Figures]:
    """The four linear layers of a dense layer, forward and backward.

    Args:
        sizes: ``s``, ``h``, ``qkv``, ``ffn`` (of the gated first layer).
        configurations: flags, and whether there is sequence parallelism.
    """
    _start()
    with FakeTensorMode():
        return [_layer(sizes, *configuration) for configuration in configurations]


def _layer(sizes: dict[str, int], flags: dict[str, Any], sequence_parallel: bool) -> Figures:
    import mindspeed
    from mindspeed import session
    from mindspeed.te.linear import Linear

    s, h, qkv, ffn = (sizes[name] for name in ("s", "h", "qkv", "ffn"))
    mindspeed.configure(**flags)
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "bias": False}
    options |= {"tp_group": dist.group.WORLD, "params_dtype": torch.bfloat16, "device": "cpu"}
    first, third = (Linear(h, out, parallel_mode="column", **options) for out in (qkv, ffn))
    second, fourth = (Linear(into, h, parallel_mode="row", **options) for into in (h, ffn // 2))
    rows = s // RANKS if sequence_parallel else s
    x = torch.empty(rows, 1, h, dtype=torch.bfloat16, requires_grad=True)

    def run() -> None:
        y = second(first(x)[..., : h // RANKS])  # attention is left out
        z = fourth(third(y)[..., : ffn // 2 // RANKS])
        z.backward(torch.empty_like(z))

    figures = _measure(run)
    session.current().detach_features()
    return figures
