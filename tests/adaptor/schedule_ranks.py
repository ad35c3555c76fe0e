"""Jobs for the ranks of test_schedule_repairs.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.pipeline.schedule import step_ranks


class _LateTransport:
    """Sends as transports do, at the latest moment: memory is read when ``wait`` is called.

    Attributes:
        lost: sends whose memory had other values by then.
        pending: sends that were not waited for.
    """

    def __init__(self) -> None:
        self.lost = self.pending = 0
        self.requests: list[Any] = []  # gloo forgets messages whose requests are gone

    def isend(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What ``torch.distributed.isend`` is replaced with."""
        given = tensor.clone()
        self.pending += 1
        self.requests.append(_isend(given, *args, **kwargs))
        return _LateSend(self, tensor, given, self.requests[-1])


class _LateSend:
    def __init__(self, *parts: Any) -> None:
        self.transport, self.tensor, self.given, self.request = parts

    def wait(self) -> None:
        self.transport.pending -= 1
        self.transport.lost += not torch.equal(self.tensor, self.given)
        self.request.wait()


_isend = dist.isend


def late_sends(repaired: bool) -> dict[str, tuple[int, int]]:
    """Two stages of two chunks: sends that lost their memory and that nobody waited for."""
    from mindspeed import session
    from mindspeed.adaptor.repairs import pipeline_sends

    if not repaired:
        session.current().engine.remove(pipeline_sends.OWNER)
    model = step_ranks.Model(step_ranks.Layout(pipeline=2, chunks=2, num_layers=4))
    found = {}
    for name, flush, forward_only in (
        ("step", False, False),
        ("step, overlapped warm-up", True, False),
        ("evaluation, overlapped warm-up", True, True),
    ):
        model.config.overlap_p2p_comm_warmup_flush = flush
        transport = _LateTransport()
        dist.isend = transport.isend
        try:
            model.step(4, forward_only=forward_only)
        finally:
            dist.isend = _isend
        found[name] = transport.lost, transport.pending
    return found
