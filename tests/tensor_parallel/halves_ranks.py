"""Models in two halves of a micro-batch, inside rank processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from mindspeed.instruments import CommLedger, Link, VirtualClock
from mindspeed.tensor_parallel.halves.order import ALL_REDUCE, SEQUENCE_PARALLEL
from mindspeed.tensor_parallel.halves.stream import Stream
from tests.support import gpt_ranks
from tests.tensor_parallel.modelled_ranks import RANKS
from tests.tensor_parallel.region_ranks import configured

OFF: dict[str, Any] = {}
ON = {"half_batch_overlap": True}


def _results(model: torch.nn.Module, samples: int, passes: int, dropout: bool) -> dict[str, Any]:
    """Loss, gradients, and collectives by phase with their bytes."""
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7)
    size = (passes, samples, gpt_ranks.SEQUENCE)
    tokens = torch.randint(gpt_ranks.VOCABULARY, size, generator=generator)
    positions = torch.arange(gpt_ranks.SEQUENCE).expand(size[1:])
    with CommLedger() as ledger:
        losses = [model(one, positions, None, labels=one.roll(-1, 1)) for one in tokens]
        for loss in losses:
            loss.mean().backward()
    grads = {name: p.grad for name, p in gpt_ranks.weights_of(model).items()}
    calls = Counter((event.phase, event.op) for event in ledger.events)
    return {
        "values": {"loss": torch.stack(losses).detach(), **grads},
        "calls": calls,
        "bytes": ledger.wire_bytes(),
    }


def compared(
    name: str, spec: str, overrides: dict[str, Any], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Largest difference from a model that runs whole, and the collectives of both.

    Args:
        name: Of the model's configuration.
        spec: Of its layers.
        overrides: Options of the transformer config.
        more: ``samples`` of a micro-batch; ``passes``: forwards before their backwards; ``frozen``:
            parameters with this in their names are not trained.
    """
    import torch.distributed as dist

    more = more or {}
    gpt_ranks.start(dist.get_world_size())
    found = []
    for values in (OFF, ON):
        with configured(values):
            options = {"tensor_model_parallel_size": dist.get_world_size(), **overrides}
            model = gpt_ranks.build(gpt_ranks.config(name, **options), spec)
            for path, parameter in model.named_parameters():
                frozen = more.get("frozen")
                parameter.requires_grad_(not frozen or frozen not in path)
            found.append(_results(model, more.get("samples", 2), more.get("passes", 1), False))
    plain, ours = found
    return {
        "differ": differing(ours["values"], plain["values"]),
        "calls": [one["calls"] for one in found],
        "bytes": [one["bytes"] for one in found],
    }


def differing(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Names of tensors that differ by more than 1e-6 of the largest element, and how much."""
    found = {}
    for name, expected in plain.items():
        got = ours[name]
        if (got is None) != (expected is None):
            found[name] = float("nan")
        elif expected is not None:
            error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
            if not error <= 1e-6:
                found[name] = error
    return found


class LinearSublayer:
    """A column- and a row-parallel linear layer, without norm, dropout or bias."""

    def __init__(self, width: int, hidden: int, sequence_parallel: bool) -> None:
        import torch.distributed as dist

        from mindspeed.te.linear import Linear
        from mindspeed.tensor_parallel.exchange import at_row_input

        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "bias": False}
        options |= {"tp_group": dist.group.WORLD, "device": "cpu"}
        self.column = Linear(hidden, width, parallel_mode="column", **options)
        self.row = Linear(width, hidden, parallel_mode="row", **options)
        self.row.register_forward_pre_hook(at_row_input)
        self.norm_parameters: list[Any] = []
        self.parameters = [self.column.weight, self.row.weight]

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 1.0

    def run(self, x: torch.Tensor, half: int) -> tuple[torch.Tensor, None]:
        return self.row(self.column(x)), None

    def leave(
        self, output: torch.Tensor, bias: None, hidden: torch.Tensor, half: int
    ) -> torch.Tensor:
        return output + hidden


def _gather(x: torch.Tensor) -> Any:
    import torch.distributed as dist

    whole = x.new_empty(x.shape[0] * RANKS, *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x, async_op=True)


def modelled(
    parts: tuple[int, int], wires: list[float], layers: int, sequence_parallel: bool, halves: bool
) -> list[tuple[float, float]]:
    """Seconds of ``layers`` layers forward and backward, by the virtual clock.

    The forward of a layer takes 1 second, and what an all-reduce of a micro-batch takes is given.

    Args:
        parts: Shares of attention and MLP.
        wires: Seconds of one all-reduce of the whole micro-batch.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.tensor_parallel.modelled_ranks import RANKS, _start

    _start()
    s, b, h, unit = 4 * RANKS, 2, 64, 8 * RANKS
    flops = sum(2 * 2 * s * b * h * unit * part // RANKS for part in parts)
    sent = 2 * s * b * h * 4 * (RANKS - 1) // RANKS
    found = []
    with FakeTensorMode():
        chain = [
            [LinearSublayer(unit * part, h, sequence_parallel) for part in parts]
            for _ in range(layers)
        ]
        for wire in wires:
            rows = s // RANKS if sequence_parallel else s
            hidden = torch.empty(rows, b, h, requires_grad=True)
            link = Link(sent / wire)
            with VirtualClock(flops, link) as clock:
                out = (
                    _in_halves(chain, hidden, sequence_parallel)
                    if halves
                    else _whole(chain, hidden)
                )
                forward = clock.now
                out.backward(torch.empty_like(out))
                found.append((forward, clock.now - forward))
    return found


def _in_halves(chain: list[Any], hidden: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    order = SEQUENCE_PARALLEL if sequence_parallel else ALL_REDUCE
    stream = Stream(hidden, order, _gather if sequence_parallel else None)
    for layer, following in zip(chain, [*chain[1:], None], strict=True):
        hidden = stream.run(hidden, layer, following and following[0])
    return hidden


def _whole(chain: list[Any], hidden: torch.Tensor) -> torch.Tensor:
    for layer in chain:
        for sublayer in layer:
            output, bias = sublayer.run(sublayer.enter(hidden), 0)
            hidden = sublayer.leave(output, bias, hidden, 0)
    return hidden
