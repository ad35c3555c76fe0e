"""Models in two halves of a micro-batch, inside rank processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from mindspeed.instruments import CommLedger, Link, VirtualClock
from mindspeed.tensor_parallel.halves.megatron import HalvesForward
from mindspeed.tensor_parallel.halves.order import ALL_REDUCE, SEQUENCE_PARALLEL
from mindspeed.tensor_parallel.halves.stream import HalvesStream
from tests.support import gpt_ranks
from tests.tensor_parallel.modelled_ranks import RANKS, _start
from tests.tensor_parallel.region_ranks import _adapt, configured

OFF: dict[str, Any] = {}
ON = {"half_batch_overlap": True}


def _results(model: torch.nn.Module, samples: int, passes: int) -> dict[str, Any]:
    """Loss, gradients, steps, collectives by phase with their bytes, parameters' hooks that ran."""
    from megatron.core.tensor_parallel import random

    ran, steps = Counter[str](), list[str]()
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, name=name: ran.update([name]))
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), HalvesForward):
            forward.trace = steps.append
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
        "steps": steps,
        "hooks": ran,
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
            parameters with this in their names are not trained; ``lora``: layers with an adapter.
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
            if lora := more.get("lora"):
                _adapt(model, lora)
            found.append(_results(model, more.get("samples", 2), more.get("passes", 1)))
    plain, ours = found
    return {
        "differ": differing(ours["values"], plain["values"]),
        "steps": ours["steps"],
        **{name: [one[name] for one in found] for name in ("hooks", "calls", "bytes")},
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
    parts: tuple[int, int],
    wires: list[float],
    chains: list[int],
    sequence_parallel: bool,
    halves: bool,
) -> list[list[tuple[float, float]]]:
    """Seconds of layers forward and backward, by the virtual clock: by number of layers and wire.

    The forward of a layer takes 1 second.

    Args:
        parts: Shares of attention and MLP.
        wires: Seconds of one all-reduce of the whole micro-batch.
        chains: Numbers of layers.
        sequence_parallel: Of the layers.
        halves: The micro-batch runs in halves.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    _start()
    s, b, h, unit = 4 * RANKS, 2, 64, 8 * RANKS
    flops = sum(2 * 2 * s * b * h * unit * part // RANKS for part in parts)
    sent = 2 * s * b * h * 4 * (RANKS - 1) // RANKS
    run = _in_halves if halves else _whole
    found = []
    with FakeTensorMode():
        for layers in chains:
            chain = [
                [LinearSublayer(unit * part, h, sequence_parallel) for part in parts]
                for _ in range(layers)
            ]
            rows = s // RANKS if sequence_parallel else s
            found.append([])
            for wire in wires:
                hidden = torch.empty(rows, b, h, requires_grad=True)
                with VirtualClock(flops, Link(sent / wire)) as clock:
                    out = run(chain, hidden, sequence_parallel)
                    forward = clock.now
                    out.backward(torch.empty_like(out))
                found[-1].append((forward, clock.now - forward))
    return found


def _in_halves(chain: list[Any], hidden: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    order = SEQUENCE_PARALLEL if sequence_parallel else ALL_REDUCE
    stream = HalvesStream(hidden, order, _gather if sequence_parallel else None)
    for layer, following in zip(chain, [*chain[1:], None], strict=True):
        hidden = stream.run(hidden, layer, following and following[0])
    return hidden


def _whole(chain: list[Any], hidden: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    for layer in chain:
        for sublayer in layer:
            output, bias = sublayer.run(sublayer.enter(hidden), 0)
            hidden = sublayer.leave(output, bias, hidden, 0)
    return hidden


def changed_between() -> dict[str, Any]:
    """The error of a hook that changes what a layer returns; one sample, which runs whole."""
    import torch.distributed as dist

    from mindspeed.errors import TrainingError

    gpt_ranks.start(dist.get_world_size())
    options = {"tensor_model_parallel_size": dist.get_world_size()}
    with configured(ON):
        model = gpt_ranks.build(gpt_ranks.config("rmsnorm-swiglu-gqa", **options), "te")
        layer = model.decoder.layers[0]
        hook = layer.register_forward_hook(lambda module, args, out: (out[0] * 2, out[1]))
        try:
            error = str(_results(model, 2, 1)["bytes"])
        except TrainingError as found:
            error = str(found)
        hook.remove()
        ours = _results(model, 1, 1)
    plain = gpt_ranks.build(gpt_ranks.config("rmsnorm-swiglu-gqa", **options), "te")
    return {
        "error": error,
        "whole": differing(ours["values"], _results(plain, 1, 1)["values"]),
    }


def other_layers() -> str:
    """The error of a model with experts, where no flag tells of them."""
    import torch.distributed as dist

    from mindspeed.errors import ConfigError

    gpt_ranks.start(dist.get_world_size())
    options = {"tensor_model_parallel_size": dist.get_world_size(), "sequence_parallel": True}
    with configured(ON):
        try:
            gpt_ranks.build(gpt_ranks.config("moe-grouped", **options), "te")
        except ConfigError as found:
            return str(found)
    return ""


def kept(sequence_parallel: bool) -> list[int]:
    """Bytes alive between forward and backward, of whole micro-batches and of halves."""
    import torch.distributed as dist

    from mindspeed.instruments.live_memory import LiveMemory

    size = dist.get_world_size()
    gpt_ranks.start(size)
    options = {"tensor_model_parallel_size": size, "sequence_parallel": sequence_parallel}
    tokens = torch.arange(4 * gpt_ranks.SEQUENCE).view(4, -1) % gpt_ranks.VOCABULARY
    positions = torch.arange(gpt_ranks.SEQUENCE).expand(tokens.shape)
    found = []
    for values in (OFF, ON):
        with configured(values):
            cfg = gpt_ranks.config("rmsnorm-swiglu-gqa", num_layers=4, **options)
            model = gpt_ranks.build(cfg, "te")
            model(tokens, positions, None, labels=tokens).mean().backward()  # rotary tables
            with LiveMemory() as memory:
                loss = model(tokens, positions, None, labels=tokens).mean()
                found.append(memory.total)
                loss.backward()
    return found
