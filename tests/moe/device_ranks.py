"""Layers whose sizes stay on the device, beside the same program with sizes on the host."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.row_exchange import EQUAL_BLOCKS, RowExchange
from mindspeed.moe.symmetric_memory import SymmetricMemory
from tests.moe import hybrid_ep_emulator, layer_ranks, symmetric_emulator
from tests.moe.dispatch_ranks import Case, built
from tests.support import trainer_job


class NoHost(TorchDispatchMode):
    """Fails where a value of a tensor would reach the host or a shape, on the CPU, too."""

    OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one in func.__name__ for one in self.OPERATORS):
            raise RuntimeError(f"reads the device: {func.__name__}")
        return func(*args, **(kwargs or {}))


class NoMethod(TorchFunctionMode):
    """The same for methods that read the memory of a CPU tensor without an operator."""

    METHODS = frozenset({"tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__index__"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.METHODS:
            raise RuntimeError(f"reads the device: {func.__name__}")
        return func(*args, **(kwargs or {}))


@dataclass
class Compared:
    """One layer on one rank.

    Attributes:
        name: of the case.
        difference: the largest of outputs and gradients, as a share of the largest value.
        overflown: whether rows were left out.
        collectives: of forward and backward: here, and with sizes on the host.
        sent: bytes of each all-to-all, likewise.
    """

    name: str
    difference: float
    overflown: bool
    collectives: tuple[tuple[int, int], tuple[int, int]]
    sent: tuple[list[int], list[int]]


def compare(
    cases: Sequence[Case], factor: float, trapped: bool = True, **way: Any
) -> list[Compared]:
    """All cases; the first variant of each is its program.

    Args:
        trapped: no list is made of a tensor, not even of one that the host has itself.
    """
    found = []
    for case in cases:
        layer, fields = built(case), case.variants[0]
        plain, log, sent = _run(layer, fields, case.options)
        bound = DeviceBound(factor)
        with NoHost(), NoMethod() if trapped else contextlib.nullcontext():
            ours, own, own_sent = _run(
                layer, fields | {"exchange": "device", "bound": bound, **way}, case.options
            )
        assert ours.keys() == plain.keys()
        differences = [
            float((x - plain[name]).abs().max() / plain[name].abs().max().clamp(min=1e-30))
            for name, x in ours.items()
        ]
        flag = bound.overflown()
        assert flag is not None
        collectives = tuple(
            tuple(len(one.communications(phase)) for phase in ("forward", "backward"))
            for one in (own, log)
        )
        found.append(
            Compared(case.name, max(differences), bool(flag), collectives, (own_sent, sent))
        )
    return found


def compare_by_symmetric_memory(
    cases: Sequence[Case], factor: float
) -> tuple[list[Compared], list[int]]:
    """The same with the operator for symmetric memory, and the rows of its calls."""
    with symmetric_emulator.emulated():
        found = compare(cases, factor, row_exchange=SymmetricMemory())
    calls = symmetric_emulator.CALLS
    assert all(not set(one) & set(other) for one, other in itertools.pairwise(calls))
    return found, list(symmetric_emulator.ROWS)


def compare_by_hybrid_ep(cases: Sequence[Case], factor: float) -> list[Compared]:
    """The same with HybridEP, whose buffers are those of one group."""
    found = []
    for one in cases:
        with hybrid_ep_emulator.emulated():
            found += compare([one], factor, exchange="hybridep")
    return found


def _run(layer: Any, fields: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, list[int]]:
    from mindspeed.instruments import CommLedger
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change

    journal, log = Journal(), EventLog()
    change(layer, journal, **fields)
    layer.forward.log = log
    with CommLedger() as ledger:
        result = layer_ranks.run(layer, **options)
    journal.undo()
    sent = [one.wire for one in ledger.events if one.op == "all_to_all"]
    return {"output": result.output, **result.gradients}, log, sent


def compare_in_chunks(
    layout: dict[str, int], factor: float, way: str, tensor_overlap: bool
) -> tuple[float, list[int], list[list[str]]]:
    """A transformer layer in chunks of the sequence, with sizes on the device and on the host.

    Args:
        layout: arguments of :func:`layer_ranks.start`.
        factor: C.
        way: "blocks" or "symmetric".
        tensor_overlap: collectives of sliced experts hide, too.

    Returns:
        The largest difference of outputs and gradients, the layers with too many rows, and the
        events of both.
    """
    from mindspeed.journal import Journal
    from mindspeed.moe.ampipe.megatron import attach
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change
    from tests.moe import ampipe_ranks

    layer_ranks.start(**layout)
    layer = ampipe_ranks.transformer_layer("te", **layer_ranks.parallel_of(layout))
    journal, bound, events = Journal(), DeviceBound(factor), []
    attach(layer, 2, journal, tensor_overlap=tensor_overlap)
    with symmetric_emulator.emulated() if way == "symmetric" else contextlib.nullcontext():
        results = []
        for on_device in (False, True):
            if on_device:
                carrier = SymmetricMemory() if way == "symmetric" else EQUAL_BLOCKS
                change(layer.mlp, journal, exchange="device", bound=bound, row_exchange=carrier)
            layer.forward.log = EventLog()
            with contextlib.ExitStack() as traps:
                for trap in (NoHost(), NoMethod()) if on_device else ():
                    traps.enter_context(trap)
                results.append(ampipe_ranks.run(layer))
            events.append([str(one) for one in layer.forward.log.events])
    plain, ours = ({"output": one.output, **one.gradients} for one in results)
    assert ours.keys() == plain.keys()
    differences = [float((x - plain[name]).abs().max()) for name, x in ours.items()]
    return max(differences), bound.layers(), events


def reads_of_the_plain_program() -> str:
    """What the trap says of the program with sizes on the host."""
    layer = built(Case("plain", {"expert": 2}, {}, []))
    try:
        with NoHost(), NoMethod():
            _run(layer, {}, {})
    except RuntimeError as error:
        return str(error)
    return ""


def on_meta(pipe_slices: int) -> tuple[int, ...]:
    """The shape of a layer's output on tensors without values, in bf16, with gradients."""
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change

    torch.is_autocast_enabled = lambda kind: False  # it knows no meta; this process ends soon
    layer = built(Case("meta", {}, {"params_dtype": torch.bfloat16}, [])).to("meta")
    bound = DeviceBound(1.5)
    change(layer, Journal(), exchange="device", bound=bound, pipe_slices=pipe_slices)
    x = torch.randn(12, 1, layer_ranks.HIDDEN, device="meta", dtype=torch.bfloat16).requires_grad_()
    output, _ = layer(x)
    output.sum().backward()
    assert x.grad is not None
    return tuple(output.shape)


def truncated(symmetric: bool) -> tuple[bool, list[str]]:
    """Whether rows were left out at C = 1, and what differs from dropping the same rows before."""
    if not symmetric:
        return _truncated(EQUAL_BLOCKS)
    with symmetric_emulator.emulated():
        return _truncated(SymmetricMemory())


def _truncated(row_exchange: RowExchange) -> tuple[bool, list[str]]:

    layer = built(Case("truncated", {"expert": 2}, {}, [], experts=6))
    route, capacity = layer.route, layer_ranks.TOKENS
    bound = DeviceBound(1.0)
    way = {"exchange": "device", "bound": bound, "row_exchange": row_exchange}
    ours, _, _ = _run(layer, way, {})

    def kept(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = route(*args)
        first = routing_map.view(-1, 2, 4).transpose(1, 2).transpose(0, 1)  # expert, token, rank
        place = (first.reshape(-1, 2).cumsum(0) - 1).view(4, -1, 2)
        stays = routing_map & (place.permute(1, 2, 0).reshape(routing_map.shape) < capacity)
        return probs * stays, stays

    layer.route = kept
    dropped, _, _ = _run(layer, {"dropped": True}, {})
    flag = bound.overflown()
    return bool(flag), [name for name, x in ours.items() if not x.equal(dropped[name])]


def trained(flags: Sequence[str]) -> dict[str, Any]:
    """Train, and count the collectives of each step."""
    from mindspeed.instruments import CommLedger
    from mindspeed.training.step import Trainer

    step, counts = Trainer.step, []

    def counted(self: Any, *args: Any) -> Any:
        with CommLedger() as ledger:
            result = step(self, *args)
        counts.append(len(ledger.events))
        return result

    Trainer.step = counted
    try:
        return {**trainer_job.train(flags), "collectives": counts}
    finally:
        Trainer.step = step


def accumulated() -> str:
    """What a second pass says that was too small, after a first without an optimizer's step."""
    from mindspeed.errors import TrainingError
    from mindspeed.guard.megatron_bounded_steps import BoundedSteps

    bound = DeviceBound(1.0, most=8.0)
    steps = BoundedSteps(bound, True, "--moe-device-bound")
    optimizer = SimpleNamespace(zero_grad=lambda: None)
    steps.with_optimizer(optimizer)

    def schedule(*, data_iterator: Any, model: Any, small: bool) -> list[Any]:
        bound.note(1, torch.tensor(small and bound.factor == 1))
        return []

    run = steps.with_schedule(schedule)
    for small in (False, True):  # gradients are zero in between
        optimizer.zero_grad()
        run(data_iterator=None, model=torch.nn.Linear(1, 1), small=small)
    bound.factor = 1.0
    try:
        run(data_iterator=None, model=torch.nn.Linear(1, 1), small=True)
    except TrainingError as error:
        return str(error)
    return ""
