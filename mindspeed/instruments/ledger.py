"""Counts every collective of this rank: which, over which group, in which phase, how many bytes.

    with CommLedger() as ledger:
        loss = model(batch)
        loss.backward()
    assert ledger.bytes("all_gather", group=tp_group, phase="forward") == 4 * s * b * h
    print(ledger)

It watches the ``c10d`` and functional-collective operators through a ``TorchDispatchMode``, below
``torch.distributed``'s Python functions: names bound at import time, async and coalesced calls,
sends and receives, and calls made by autograd in the backward pass all arrive there, and so do
those inside the kernels of `mindspeed.ops`; kernels of other packages that fuse a matrix product
with a collective count as that collective. Not seen: calls from other Python threads, and
process groups written in Python, which do not call the operators.
:mod:`mindspeed.instruments.clock` measures waits.

Two byte counts per call, for a group of p ranks and a tensor of t bytes:

==============  ===========================  ===================================================
operation       payload t                    wire: bytes this rank sends (ring algorithms)
==============  ===========================  ===================================================
all_reduce      the tensor                   2 (p-1)/p t
all_gather      this rank's shard (input)    (p-1) t
reduce_scatter  the full input               (p-1)/p t
all_to_all      the input                    what goes to other ranks, exact for uneven splits
send            the tensor                   t
recv            the tensor                   0 (its sender counts it)
broadcast,      the tensor                   (p-1)/p t: the average over ranks, so that the sum
reduce                                       over ranks is the total traffic
gather,         one rank's shard             (p-1)/p t, likewise
scatter
barrier         0                            0
==============  ===========================  ===================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments.flops import Formula, formula_of
from mindspeed.instruments.instrument import Instrument, PhaseTracker, arguments_of
from mindspeed.ops import registry
from mindspeed.ops.process_groups import resolve

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "npu", "symm_mem")


@dataclass(frozen=True)
class Communication:
    """One call of a collective or point-to-point operator on this rank."""

    op: str
    group: str  # unique name of the process group
    description: str  # given by its creator
    ranks: tuple[int, ...]  # global ranks
    phase: str  # "forward", "backward" or "recompute"
    payload: int
    wire: int


class CommLedger(Instrument):
    """Context manager that records every :class:`Communication` of the current thread."""

    def __init__(self) -> None:
        self.events: list[Communication] = []
        super().__init__()
        self.mode = CommunicationMode(self.phase, self.events.append)

    def select(
        self,
        op: str | None = None,
        *,
        group: dist.ProcessGroup | str | None = None,
        phase: str | None = None,
    ) -> Iterator[Communication]:
        """Yields the calls of one operation, group (object, name or description) and phase."""
        for event in self.events:
            if op is not None and event.op != op:
                continue
            if phase is not None and event.phase != phase:
                continue
            if group is not None and not _is_group(event, group):
                continue
            yield event

    def calls(self, op: str | None = None, **selection: Any) -> int:
        """Number of calls; the selection is that of :meth:`select`. A coalesced call is one."""
        return sum(1 for _ in self.select(op, **selection))

    def bytes(self, op: str | None = None, **selection: Any) -> int:
        """Payload bytes, see the table at the top of this module."""
        return sum(event.payload for event in self.select(op, **selection))

    def wire_bytes(self, op: str | None = None, **selection: Any) -> int:
        """Bytes this rank puts on the wire with ring algorithms, see the table above."""
        return sum(event.wire for event in self.select(op, **selection))

    def __str__(self) -> str:
        calls, payload, wire = Counter[Any](), Counter[Any](), Counter[Any]()
        for event in self.events:
            key = (event.op, event.description, event.ranks, event.phase)
            calls[key] += 1
            payload[key] += event.payload
            wire[key] += event.wire
        rows: list[tuple[str, ...]] = [
            ("operation", "group", "ranks", "phase", "calls", "payload", "wire")
        ]
        for key in calls:
            op, description, ranks, phase = key
            numbers = (f"{counter[key]:,}" for counter in (calls, payload, wire))
            rows.append((op, description, _short(ranks), phase, *numbers))
        totals = (f"{counter.total():,}" for counter in (calls, payload, wire))
        rows.append(("total", "", "", "", *totals))
        return _table(rows, numeric_columns=3)


def _is_group(event: Communication, group: dist.ProcessGroup | str) -> bool:
    if isinstance(group, str):
        return group in (event.group, event.description)
    return event.group == group.group_name


def _short(ranks: tuple[int, ...]) -> str:
    text = ",".join(map(str, ranks))
    return text if len(text) <= 24 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]} ({len(ranks)})"


def _table(rows: list[tuple[str, ...]], numeric_columns: int) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first_number = len(widths) - numeric_columns
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index >= first_number else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


@dataclass(frozen=True)
class OperatorTraits:
    """Properties of an operator that decide how it is counted.

    Attributes:
        name: in its schema, with the namespace.
        packet: all overloads.
        formula: of its FLOPs, if it has any.
        operator: of ours, with collectives in its kernel.
        collective: a communication of torch or torch_npu.
        plain: of ``torch.distributed``, with handles.
        moves: its inputs and outputs count as bytes read and written; not of a view, and not of a
            collective, whose bytes are those of its message.
    """

    name: str
    packet: Any
    formula: Formula | None
    operator: registry.Operator | None
    collective: bool
    plain: bool
    moves: bool

    @classmethod
    def of(cls, func: Any) -> OperatorTraits:
        """Those of an operator as a dispatch mode sees it."""
        schema = getattr(func, "_schema", None)
        if schema is None:  # an operator of higher order
            return cls(str(func), func, formula_of(func), None, False, False, False)
        operator, packet = registry.find(func), func._overloadpacket
        if operator is not None and not operator.communicates:
            operator = None
        collective, plain = func.namespace in NAMESPACES, func.namespace == "c10d"
        moves = not collective and func.namespace != "prim" and not func.is_view
        return cls(schema.name, packet, formula_of(packet), operator, collective, plain, moves)


DEVICE = torch.ops.prim.device.default
"""What FakeTensors are asked for more often than all else together."""


class CommunicationMode(TorchDispatchMode):
    """Calls ``record`` with every communication, before its operator runs."""

    def __init__(self, phase: PhaseTracker, record: Callable[[Communication], None]) -> None:
        super().__init__()
        self._phase = phase
        self._record = record
        self._traits: dict[Any, OperatorTraits] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and torch's wrapper takes longer than the rest of it."""
        return False

    def traits_of(self, func: Any) -> OperatorTraits:
        """Those of an operator, found once."""
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = OperatorTraits.of(func)
        return traits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_wraps(types):
            return NotImplemented
        kwargs, traits = kwargs or {}, self.traits_of(func)
        if traits.collective:
            for event in self.communications(func, args, kwargs):
                self._record(event)
        if traits.operator is not None:
            return self._inside(traits.operator, args)
        return func(*args, **kwargs)

    def communications(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Communication]:
        """The communications of the operator ``func`` itself, without those of its kernel."""
        name = func._schema.name.split("::")[1]
        if func.namespace not in NAMESPACES or name not in _OPERATORS:
            return []
        given = arguments_of(func, args, kwargs)
        return list(_communications(name, given, self._phase.current()))

    def _inside(self, operator: registry.Operator, args: tuple[Any, ...]) -> Any:
        # Below autograd only the kernel of the operator is left; calling it directly with this mode
        # enabled shows its communication.
        device: Any = next(x.device.type for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        with self:
            return operator.kernel(device)(*args)


def _communications(name: str, given: Mapping[str, Any], phase: str) -> Iterator[Communication]:
    group = _group(given)
    size, description = group.size(), group.group_desc
    ranks = tuple(dist.get_process_group_ranks(group))
    for op, payload, wire in _OPERATORS[name](given, size, group.rank()):
        yield Communication(op, group.group_name, description, ranks, phase, payload, ceil(wire))


def _group(given: Mapping[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    return resolve(given["hcom"] if "hcom" in given else given["group_name"])


def _nbytes(value: Any) -> int:
    """Bytes of a tensor or of nested lists of tensors."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)


# ----------------------------------------------------------- operator -> (operation, payload, wire)

Traffic = list[tuple[str, int, "int | Fraction"]]
TrafficOf = Callable[[Mapping[str, Any], int, int], Traffic]


def _ring(op: str, payload_argument: str, factor: Callable[[int], int | Fraction]) -> TrafficOf:
    def read(given: Mapping[str, Any], size: int, rank: int) -> Traffic:
        payload = _nbytes(given[payload_argument])
        return [(op, payload, payload * factor(size))]

    return read


def _all_but_own(size: int) -> Fraction:
    return Fraction(size - 1, size)


def _all_reduce(argument: str) -> TrafficOf:
    return _ring("all_reduce", argument, lambda size: 2 * _all_but_own(size))


def _all_gather(argument: str) -> TrafficOf:
    return _ring("all_gather", argument, lambda size: size - 1)


def _reduce_scatter(argument: str) -> TrafficOf:
    return _ring("reduce_scatter", argument, _all_but_own)


def _fused(collective: Callable[[str], TrafficOf], left: str, right: str) -> TrafficOf:
    """The collective of a matrix product inside a fused kernel; 16-bit, also when quantised."""

    def read(given: Mapping[str, Any], size: int, rank: int) -> Traffic:
        a, b = given[left], given[right]
        dtype = a.dtype if a.dtype.is_floating_point else torch.bfloat16
        product = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device="meta")
        return collective("product")({"product": product}, size, rank)

    return read


def _all_to_all_list(given: Mapping[str, Any], size: int, rank: int) -> Traffic:
    tensors = given["input_tensors"]
    return [("all_to_all", _nbytes(tensors), _nbytes(tensors) - _nbytes(tensors[rank]))]


def _all_to_all_single(given: Mapping[str, Any], size: int, rank: int) -> Traffic:
    tensor, splits = given["input"], given["input_split_sizes"]
    payload = _nbytes(tensor)
    if not splits:
        return [("all_to_all", payload, payload * _all_but_own(size))]
    row = payload // tensor.shape[0] if tensor.shape[0] else 0
    return [("all_to_all", payload, payload - splits[rank] * row)]


def _send(argument: str) -> TrafficOf:
    return _ring("send", argument, lambda size: 1)


def _recv(argument: str) -> TrafficOf:
    return _ring("recv", argument, lambda size: 0)


def _batch_p2p(given: Mapping[str, Any], size: int, rank: int) -> Traffic:
    traffic: Traffic = []
    for op, tensor in zip(given["op_list"], given["tensors"], strict=True):
        payload = _nbytes(tensor)
        traffic.append(("send", payload, payload) if "send" in op else ("recv", payload, 0))
    return traffic


def _barrier(given: Mapping[str, Any], size: int, rank: int) -> Traffic:
    return [("barrier", 0, 0)]


_OPERATORS: dict[str, TrafficOf] = {
    # the operators of torch.distributed's functions
    "allreduce_": _all_reduce("tensors"),
    "allreduce_coalesced_": _all_reduce("tensors"),
    "allgather_": _all_gather("input_tensors"),
    "allgather_coalesced_": _all_gather("input_list"),
    "_allgather_base_": _all_gather("input_tensor"),
    "allgather_into_tensor_coalesced_": _all_gather("inputs"),
    "reduce_scatter_": _reduce_scatter("input_tensors"),
    "_reduce_scatter_base_": _reduce_scatter("input_tensor"),
    "reduce_scatter_tensor_coalesced_": _reduce_scatter("inputs"),
    "alltoall_": _all_to_all_list,
    "alltoall_base_": _all_to_all_single,
    "broadcast_": _ring("broadcast", "tensors", _all_but_own),
    "reduce_": _ring("reduce", "tensors", _all_but_own),
    "gather_": _ring("gather", "input_tensors", _all_but_own),
    "scatter_": _ring("scatter", "output_tensors", _all_but_own),
    "send": _send("tensors"),
    "recv_": _recv("tensors"),
    "recv_any_source_": _recv("tensors"),
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
    # those of torch.distributed._functional_collectives
    "all_reduce": _all_reduce("input"),
    "all_reduce_": _all_reduce("input"),
    "all_reduce_coalesced": _all_reduce("inputs"),
    "all_reduce_coalesced_": _all_reduce("inputs"),
    "all_gather_into_tensor": _all_gather("input"),
    "all_gather_into_tensor_out": _all_gather("input"),
    "all_gather_into_tensor_coalesced": _all_gather("inputs"),
    "reduce_scatter_tensor": _reduce_scatter("input"),
    "reduce_scatter_tensor_out": _reduce_scatter("input"),
    "reduce_scatter_tensor_coalesced": _reduce_scatter("inputs"),
    "all_to_all_single": _all_to_all_single,
    "broadcast": _ring("broadcast", "input", _all_but_own),
    "isend": _send("tensor"),
    "irecv": _recv("tensor"),
    "batch_p2p_ops": _batch_p2p,
    # matrix products fused with a collective: torch_npu's and torch's for symmetric memory
    "npu_mm_all_reduce_base": _fused(_all_reduce, "x1", "x2"),
    "npu_mm_reduce_scatter_base": _fused(_reduce_scatter, "input", "x2"),
    "npu_all_gather_base_mm": _all_gather("input"),
    "fused_matmul_reduce_scatter": _fused(_reduce_scatter, "A", "B"),
    "fused_all_gather_matmul": _all_gather("A"),
}
