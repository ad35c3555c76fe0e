"""How rows travel: between processes, or between many ranks of one process.

The executor is a generator. It yields a :class:`Post` to start an exchange and gets a ticket back;
it yields the ticket to wait, and gets the received tensors. Whoever drives the generators decides
how the bytes move: :func:`run` through a process group, :func:`run_together` in lock-step within
one process, where a group of 16 ranks can be tested, or timed on one device, without processes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
Steps = Generator[Any, Any, Result]


@dataclass
class Post:
    """Messages of one rank that travel at the same time.

    Attributes:
        tag: Equal on both ends, different for exchanges that are in flight together.
        sends: ``(destination, tensor)``; the tensors are not touched until the exchange is over.
        receives: ``(source, shape)``.
        like: A tensor of the dtype and device of what is received.
    """

    tag: int
    sends: list[tuple[int, torch.Tensor]]
    receives: list[tuple[int, tuple[int, ...]]]
    like: torch.Tensor


@dataclass
class _Ticket:
    received: list[torch.Tensor]
    works: list[Any] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)


def run(steps: Steps[Result], group: dist.ProcessGroup | None) -> Result:
    """Drive one rank's generator; all ranks of the group do so. Collective.

    Args:
        steps: A generator of the executor.
        group: Ranks in the order of the plan's layout; None for the default group.
    """
    answer: Any = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(asked, Post):
            answer = _post(asked, group)
        else:
            for work in asked.works:
                work.wait()
            answer = asked.received


def _post(post: Post, group: dist.ProcessGroup | None) -> _Ticket:
    received = [post.like.new_empty(shape) for _, shape in post.receives]
    sends = [(dst, tensor.contiguous()) for dst, tensor in post.sends]
    # Both ends list their messages in the order of the plan, which is what NCCL and HCCL match by.
    operations = [
        dist.P2POp(dist.isend, tensor, group=group, tag=post.tag, group_peer=dst)
        for dst, tensor in sends
    ] + [
        dist.P2POp(dist.irecv, tensor, group=group, tag=post.tag, group_peer=src)
        for (src, _), tensor in zip(post.receives, received, strict=True)
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return _Ticket(received, works, [tensor for _, tensor in sends])


def run_together(ranks: Sequence[Steps[Result]]) -> list[Result]:
    """Drive the generators of all ranks in this process.

    Raises:
        RuntimeError: All ranks wait: somebody receives what nobody sends.
    """
    mail: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    results: dict[int, Result] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(ranks)))
    waiting: dict[int, list[tuple[int, int, int]]] = {}
    while len(results) < len(ranks):
        for rank, answer in answers.items():
            try:
                while isinstance(asked := ranks[rank].send(answer), Post):
                    for dst, tensor in asked.sends:
                        mail.setdefault((asked.tag, rank, dst), []).append(tensor.clone())
                    answer = [(asked.tag, src, rank) for src, _ in asked.receives]
                waiting[rank] = asked
            except StopIteration as end:
                results[rank] = end.value
        ready = [rank for rank, keys in waiting.items() if all(mail.get(key) for key in keys)]
        if not ready and waiting:
            raise RuntimeError(f"ranks {sorted(waiting)} wait for messages that nobody sends")
        answers = {rank: [mail[key].pop(0) for key in waiting.pop(rank)] for rank in ready}
    return [results[rank] for rank in range(len(ranks))]
