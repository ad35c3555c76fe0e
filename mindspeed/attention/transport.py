"""How rows travel: between processes, or between many ranks of one process.

The executor is a generator. It yields a :class:`Post` to start an exchange and gets a ticket back;
it yields the ticket to wait, and gets the received rows. Whoever drives the generators decides how
the bytes move: :func:`run` through process groups, :func:`run_together` in lock-step within one
process, where a group of 16 ranks can be tested, or timed on one device, without processes.

An exchange is one ``all_to_all_single`` of all ranks where somebody has several partners, and a
send and a receive between neighbours where nobody has (a ring): a collective of all ranks would
make each step wait for the slowest. Which of the two is a property of the plan, not of a rank, and
ranks post in the order of the plan, so nobody waits for somebody who is elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
Steps = Generator[Any, Any, Result]
Counts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Post:
    """What one rank sends and receives at a time, as rows of equal width.

    Attributes:
        tag: Equal on all ranks, different for exchanges that are in flight together.
        collective: All ranks take part, even with nothing to send.
        rows: What is sent, ``[rows, width]``, destination by destination.
        sends: ``(destination, rows)`` in ascending order of destinations.
        receives: ``(source, rows)`` in ascending order of sources.
        home: Gradients and results on their way home, which may use a communicator of their own.
    """

    tag: int
    collective: bool
    rows: torch.Tensor
    sends: Counts
    receives: Counts
    home: bool = False

    def buffer(self) -> torch.Tensor:
        """For what is received: source by source."""
        return self.rows.new_empty(sum(rows for _, rows in self.receives), self.rows.shape[1])


@dataclass
class _Ticket:
    received: torch.Tensor
    works: list[Any] = field(default_factory=list)
    sent: torch.Tensor | None = None  # not freed before it has left


def run(
    steps: Steps[Result],
    group: dist.ProcessGroup | None,
    home: dist.ProcessGroup | None = None,
) -> Result:
    """Drive one rank's generator; all ranks of the group do so. Collective.

    Args:
        steps: A generator of the executor.
        group: Ranks in the order of the plan's layout; None for the default group.
        home: The same ranks, for what travels home at the same time; None for ``group``.
    """
    answer: Any = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(asked, Post):
            answer = _post(asked, home if asked.home and home is not None else group)
        else:
            for work in asked.works:
                work.wait()
            answer = asked.received


def _post(post: Post, group: dist.ProcessGroup | None) -> _Ticket:
    received, sent = post.buffer(), post.rows.contiguous()
    if post.collective:
        ranks = range(dist.get_world_size(group))
        outgoing, incoming = dict(post.sends), dict(post.receives)
        work = dist.all_to_all_single(
            received, sent,
            [incoming.get(rank, 0) for rank in ranks], [outgoing.get(rank, 0) for rank in ranks],
            group=group, async_op=True,
        )  # fmt: skip
        return _Ticket(received, [work], sent)
    _warm_up(group, sent.device)
    operations = [
        dist.P2POp(operation, part, group=group, tag=post.tag, group_peer=peer)
        for operation, rows, counts in (
            (dist.isend, sent, post.sends),
            (dist.irecv, received, post.receives),
        )
        for (peer, _), part in zip(
            counts, rows.split([n for _, n in counts]) if counts else (), strict=True
        )
    ]
    return _Ticket(received, dist.batch_isend_irecv(operations) if operations else [], sent)


_warm: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _warm_up(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """The first batch of sends on a communicator of NCCL or HCCL must be of all its ranks."""
    communicator = group or dist.group.WORLD
    if device.type != "cpu" and communicator is not None and communicator not in _warm:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _warm.add(communicator)


def run_together(ranks: Sequence[Steps[Result]]) -> list[Result]:
    """Drive the generators of all ranks in this process.

    Raises:
        RuntimeError: All ranks wait: somebody receives what nobody sends.
    """
    mail: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    results: dict[int, Result] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(ranks)))
    waiting: dict[int, tuple[torch.Tensor, list[tuple[int, int, int]]]] = {}
    while len(results) < len(ranks):
        for rank, answer in answers.items():
            try:
                while isinstance(asked := ranks[rank].send(answer), Post):
                    parts = asked.rows.split([n for _, n in asked.sends]) if asked.sends else ()
                    for (dst, _), part in zip(asked.sends, parts, strict=True):
                        mail.setdefault((asked.tag, rank, dst), []).append(part.clone())
                    answer = asked.buffer(), [(asked.tag, src, rank) for src, _ in asked.receives]
                waiting[rank] = asked
            except StopIteration as end:
                results[rank] = end.value
        ready = [r for r, (_, keys) in waiting.items() if all(mail.get(key) for key in keys)]
        if not ready and waiting:
            raise RuntimeError(f"ranks {sorted(waiting)} wait for messages that nobody sends")
        answers = {}
        for rank in ready:
            buffer, keys = waiting.pop(rank)
            parts = [mail[key].pop(0) for key in keys]
            answers[rank] = torch.cat(parts, out=buffer) if parts else buffer
    return [results[rank] for rank in range(len(ranks))]
