"""How the tensors of a plan are sent: between processes, or between ranks simulated in one process.

The executor is a generator. It yields an :class:`Exchange` to start a communication and gets a
handle; it yields the handle to wait, and gets the received rows. The driver of the generator
decides how the bytes move:

* :func:`run_on_group` communicates over process groups.
* :func:`run_in_one_process` drives the generators of all ranks in lock-step, so that a group of 16
  ranks can be tested, or timed on one device, without processes.

An exchange in which some rank has several peers is one ``all_to_all_single`` of all ranks. An
exchange in which no rank has (a ring) is a send and a receive between neighbours, because a
collective of all ranks would make each step wait for the slowest rank. Which of the two is a
property of the plan, not of a rank, and ranks start exchanges in the order of the plan, so no rank
waits for an exchange that another one never starts.

Several tensors in one message have their columns concatenated row by row (:func:`pack`). Packed
keys and values are ``[t, g * d + g * d_v]``: all key heads, then all value heads.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class PackedKVShape:
    """Shape of a row of packed keys and values.

    Attributes:
        groups: Key and value heads, g.
        head_size: Of a key head, d.
        value_size: Of a value head, d_v.
    """

    groups: int
    head_size: int
    value_size: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> PackedKVShape:
        """Shape of keys ``[t, g, d]`` and values ``[t, g, d_v]``, any dtype."""
        return cls(k.shape[1], k.shape[2], v.shape[2])

    @property
    def key_width(self) -> int:
        """Columns of the keys; those of the values follow."""
        return self.groups * self.head_size

    @property
    def width(self) -> int:
        """All columns."""
        return self.groups * (self.head_size + self.value_size)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[t, g, d]`` and ``[t, g, d_v]`` of ``[t, width]``, any dtype."""
        k, v = packed[:, : self.key_width], packed[:, self.key_width :]
        return k.unflatten(1, (self.groups, -1)), v.unflatten(1, (self.groups, -1))


def pack(*tensors: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors ``[t, ...]`` to ``[t, columns]`` in the dtype of the first.

    A tensor of a wider dtype (fp32 statistics beside bf16 activations) keeps its bits: it is
    reinterpreted, not rounded. Round before packing what should be rounded.
    """
    dtype = tensors[0].dtype
    columns = (x.flatten(1) for x in tensors)
    columns = (x if x.dtype == dtype else x.contiguous().view(dtype) for x in columns)
    return torch.cat(tuple(columns), 1)


def unpack(
    packed: torch.Tensor, *shapes: tuple[tuple[int, ...], torch.dtype]
) -> list[torch.Tensor]:
    """The inverse of :func:`pack`: tensors ``[t, *shape]`` of the given dtypes."""
    found = []
    column = 0
    for shape, dtype in shapes:
        width = torch.Size(shape).numel() * dtype.itemsize // packed.itemsize
        part = packed[:, column : column + width]
        if dtype != packed.dtype:
            part = part.contiguous().view(dtype)
        found.append(part.unflatten(1, shape))
        column += width
    return found


Result = TypeVar("Result")
ExchangeGenerator = Generator[Any, Any, Result]
"""Yields exchanges and their handles; returns the result of a rank."""
RowCounts = tuple[tuple[int, int], ...]
"""``(peer, number of rows)``, by ascending peer."""


@dataclass(frozen=True)
class Exchange:
    """The rows of equal width that one rank sends and receives in one communication.

    Attributes:
        tag: Equal on all ranks; different for exchanges that are in flight at the same time.
        collective: All ranks take part, also those with nothing to send.
        rows: ``[rows, width]``, destination by destination.
        sends: Destinations and their numbers of rows.
        receives: Sources and their numbers of rows.
        to_owner: Gradients and partial results on the way back to the owner of the tokens, which
            may use the overlap group.
    """

    tag: int
    collective: bool
    rows: torch.Tensor
    sends: RowCounts
    receives: RowCounts
    to_owner: bool = False

    def receive_buffer(self) -> torch.Tensor:
        """Uninitialised ``[received rows, width]``, source by source, in the dtype of ``rows``."""
        return self.rows.new_empty(sum(rows for _, rows in self.receives), self.rows.shape[1])


@dataclass
class _Handle:
    received: torch.Tensor
    works: list[Any] = field(default_factory=list)
    sent: torch.Tensor | None = None  # must stay alive until it is sent


def run_on_group(
    steps: ExchangeGenerator[Result],
    group: dist.ProcessGroup | None,
    overlap_group: dist.ProcessGroup | None = None,
) -> Result:
    """Drive the generator of this rank. Collective over the group.

    Args:
        steps: A generator of the executor.
        group: Ranks in the order of the plan's sharding; None for the default group.
        overlap_group: A second group of the same ranks, for what returns to its owner while keys
            and values arrive; None for ``group``.
    """
    answer: Any = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(request, Exchange):
            other = request.to_owner and overlap_group is not None
            answer = _start(request, overlap_group if other else group)
        else:
            for work in request.works:
                work.wait()
            answer = request.received


def _start(exchange: Exchange, group: dist.ProcessGroup | None) -> _Handle:
    received, sent = exchange.receive_buffer(), exchange.rows.contiguous()
    if exchange.collective:
        ranks = range(dist.get_world_size(group))
        outgoing, incoming = dict(exchange.sends), dict(exchange.receives)
        work = dist.all_to_all_single(
            received, sent,
            [incoming.get(rank, 0) for rank in ranks], [outgoing.get(rank, 0) for rank in ranks],
            group=group, async_op=True,
        )  # fmt: skip
        return _Handle(received, [work], sent)
    _warm_up(group, sent.device)
    operations = [
        dist.P2POp(operation, part, group=group, tag=exchange.tag, group_peer=peer)
        for operation, rows, counts in (
            (dist.isend, sent, exchange.sends),
            (dist.irecv, received, exchange.receives),
        )
        for (peer, _), part in zip(
            counts, rows.split([n for _, n in counts]) if counts else (), strict=True
        )
    ]
    return _Handle(received, dist.batch_isend_irecv(operations) if operations else [], sent)


_warm: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _warm_up(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Create the communicator: the first P2P batch of NCCL or HCCL must involve all its ranks."""
    communicator = group or dist.group.WORLD
    if device.type != "cpu" and communicator is not None and communicator not in _warm:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _warm.add(communicator)


def run_in_one_process(ranks: Sequence[ExchangeGenerator[Result]]) -> list[Result]:
    """Drive the generators of all ranks in this process.

    Raises:
        RuntimeError: Deadlock: all remaining ranks wait for rows that no rank sends.
    """
    messages: dict[tuple[int, int, int], list[torch.Tensor]] = {}  # (tag, source, destination)
    results: dict[int, Result] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(ranks)))
    waiting: dict[int, tuple[torch.Tensor, list[tuple[int, int, int]]]] = {}
    while len(results) < len(ranks):
        for rank, answer in answers.items():
            try:
                while isinstance(request := ranks[rank].send(answer), Exchange):
                    sizes = [n for _, n in request.sends]
                    parts = request.rows.split(sizes) if request.sends else ()
                    for (dst, _), part in zip(request.sends, parts, strict=True):
                        messages.setdefault((request.tag, rank, dst), []).append(part.clone())
                    keys = [(request.tag, src, rank) for src, _ in request.receives]
                    answer = request.receive_buffer(), keys
                waiting[rank] = request
            except StopIteration as end:
                results[rank] = end.value
        ready = [r for r, (_, keys) in waiting.items() if all(messages.get(key) for key in keys)]
        if not ready and waiting:
            raise RuntimeError(f"ranks {sorted(waiting)} wait for messages that nobody sends")
        answers = {}
        for rank in ready:
            buffer, keys = waiting.pop(rank)
            parts = [messages[key].pop(0) for key in keys]
            answers[rank] = torch.cat(parts, out=buffer) if parts else buffer
    return [results[rank] for rank in range(len(ranks))]
