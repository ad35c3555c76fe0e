"""Messages between the ranks of a pipeline: receives posted early, sends kept until complete.

Each ordered pair of ranks has a stream of its own: two process groups span the pipeline, one for
messages to higher ranks and one for messages to lower ranks. In one group both directions of a pair
would wait for each other where the backend serialises what a communicator does (NCCL, HCCL).

A connection is made when it is first used, and waits for the other side. Ranks that each post a
receive first would wait for ever, so all connections that a plan needs are made before, in one
order.

A message has no tag. Its receiver knows the order in which its sender sends (``Plan.channels``) and
posts its receives in that order.

A wait that fails names the message and its rank (:class:`~mindspeed.errors.NoAnswer`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.device import torch_versions
from mindspeed.errors import NoAnswer
from mindspeed.pipeline.schedule.executor import PREFETCH, Tensors
from mindspeed.pipeline.schedule.plan import Plan, Transfer
from mindspeed.pipeline.schedule.row import row_of


@dataclass(frozen=True)
class Directions:
    """The two process groups over a pipeline.

    Attributes:
        upward: messages to a higher rank.
        downward: messages to a lower rank.
        ranks: the global ranks of the pipeline, in order.
        connected: the (source, target) pairs between which a message has passed.
    """

    upward: Any
    downward: Any
    ranks: tuple[int, ...]
    connected: set[tuple[int, int]] = field(default_factory=set)

    def connect(self, rank: int, ends: Collection[tuple[int, int]]) -> None:
        """Send one byte along each (source, target) that is new; collective over the pipeline."""
        if all(pair in self.connected for pair in ends):
            return
        token = torch.zeros(1, dtype=torch.uint8, device=_device())
        for source, target in sorted(set(ends) - self.connected):
            group = self.group(source, target)
            if rank == source:
                with self.waiting(rank, target, "connect"):
                    dist.send(token, dst=self.ranks[target], group=group)
            elif rank == target:
                with self.waiting(rank, source, "connect"):
                    dist.recv(token, src=self.ranks[source], group=group)
            self.connected.add((source, target))

    def group(self, source: int, target: int) -> Any:
        """The group for messages between two ranks of the pipeline."""
        return self.upward if source < target else self.downward

    @contextlib.contextmanager
    def waiting(self, rank: int, other: int, action: str) -> Iterator[None]:
        """Wait for another rank of the pipeline in the block.

        Raises:
            NoAnswer: time is up, or the connection broke.
        """
        try:
            yield
        except RuntimeError as error:
            here, there = self.ranks[rank], self.ranks[other]
            reason = (str(error).splitlines() or [""])[0]
            reason = re.sub(r"^\[\S+\] ", "", reason)  # gloo's source line
            raise NoAnswer(
                f"pipeline: rank {here} waits for rank {there} to {action}: {reason}", here, there
            ) from error


_DIRECTIONS: WeakKeyDictionary[Any, Directions] = WeakKeyDictionary()


def directions_of(pp_group: Any) -> Directions:
    """The two groups over ``pp_group``: made at its first use, by all its ranks, once.

    Only the ranks of the pipeline take part, in contrast to a plain ``new_group``, for which all
    ranks of the job would have to make the groups of all pipelines in the same order.
    """
    if pp_group not in _DIRECTIONS:
        backend = dist.get_backend(pp_group)
        upward, downward = (
            new_pipeline_group(pp_group, name, backend) for name in ("UPWARD", "DOWNWARD")
        )
        ranks = dist.get_process_group_ranks(pp_group)
        _DIRECTIONS[pp_group] = Directions(upward, downward, tuple(ranks))
    return _DIRECTIONS[pp_group]


def new_pipeline_group(pp_group: Any, name: str, backend: str) -> Any:
    """Another group of the ranks of ``pp_group``; collective over them."""
    if backend != "fake":  # ranks that do not exist know nothing
        _know_equally_many_groups(pp_group)
    return dist.new_group(
        dist.get_process_group_ranks(pp_group),
        timeout=_timeout(pp_group),
        backend=backend,
        use_local_synchronization=True,
        group_desc=f"PIPELINE_{name}_GROUP",
    )


def _know_equally_many_groups(pp_group: Any) -> None:
    """Let the ranks of ``pp_group`` find the same name for the next group that they make alone.

    torch names it after its ranks and a number of groups, which ranks of a job need not have alike:
    only some of them are in the embedding groups. Groups of one rank make up for that.
    """
    known = torch_versions.groups_in_a_name()
    counts = [torch.zeros(1, dtype=torch.int64, device=_device()) for _ in range(pp_group.size())]
    dist.all_gather(counts, torch.full_like(counts[0], known), group=pp_group)
    for _ in range(int(max(counts)) - known):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _device() -> torch.device:
    return device.current().torch_device()


def _timeout(group: Any) -> Any:
    """Time-out of operations of ``group``; None if it does not tell."""
    for backend_device in getattr(group, "_device_types", []):
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(backend_device).options._timeout
    return None


class PeerToPeer:
    """The messages of one rank in one step (:class:`.executor.Channels`).

    Args:
        plan: the plan of the step.
        rank: this rank in the pipeline.
        directions: groups over the pipeline.
        buffers: new tensors for the content of a message that this rank receives, in the sender's
            order; None while sizes are not known.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        directions: Directions,
        buffers: Callable[[Transfer], Tensors | None],
    ) -> None:
        directions.connect(rank, plan.channels)
        self._rank, self._row = rank, row_of(plan, rank, PREFETCH)
        self._directions = directions
        self._buffers = buffers
        self._unposted = dict.fromkeys(self._row.incoming, 0)  # the next message of each sender
        self._posted: dict[Transfer, tuple[Tensors, list[Any]]] = {}
        self._sending: dict[Transfer, list[tuple[Any, torch.Tensor]]] = {}

    def expect(self, transfer: Transfer) -> None:
        """Post the receive of a message, if its size is known, and of those sent before it."""
        queue = self._row.incoming[transfer.source]
        while transfer not in self._posted:
            first = queue[self._unposted[transfer.source]]
            tensors = self._buffers(first)
            if tensors is None:
                return
            group = self._directions.group(transfer.source, self._rank)
            source = self._directions.ranks[transfer.source]
            with self.waiting(transfer.source, f"send {first}"):
                handles = [dist.irecv(tensor, src=source, group=group) for tensor in tensors]
            self._posted[first] = (tensors, handles)
            self._unposted[transfer.source] += 1

    def receive(self, transfer: Transfer) -> Tensors:
        """Wait for a message."""
        self.expect(transfer)
        tensors, handles = self._posted.pop(transfer)
        with self.waiting(transfer.source, f"send {transfer}"):
            for handle in handles:
                handle.wait()
        for sent in self._row.receipts.get(transfer, ()):
            self._wait_for(sent)
        return tensors

    def send(self, transfer: Transfer, tensors: Tensors) -> None:
        """Start to send a message.

        What is sent are aliases: the caller may empty the tensors that it passed.
        """
        group = self._directions.group(self._rank, transfer.target)
        target = self._directions.ranks[transfer.target]
        sending = self._sending.setdefault(transfer, [])
        for tensor in tensors:
            alias = tensor.detach().contiguous()
            with self.waiting(transfer.target, f"take {transfer}"):
                sending.append((dist.isend(alias, dst=target, group=group), alias))

    @property
    def sending(self) -> int:
        """Messages whose tensors are kept because they may not have arrived."""
        return len(self._sending)

    def finish(self) -> None:
        """Wait until everything was sent."""
        for transfer in tuple(self._sending):
            self._wait_for(transfer)

    def _wait_for(self, transfer: Transfer) -> None:
        with self.waiting(transfer.target, f"take {transfer}"):
            for handle, _ in self._sending.pop(transfer, ()):
                handle.wait()

    def waiting(self, other: int, action: str) -> contextlib.AbstractContextManager[None]:
        """:meth:`Directions.waiting` of this rank."""
        return self._directions.waiting(self._rank, other, action)
