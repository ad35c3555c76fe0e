"""Defect: the interleaved schedule frees an output that is still being sent.

Where: ``megatron.core.pipeline_parallel.schedules``. With ``overlap_p2p_comm`` (the default of
Megatron-LM) an output gets new, empty ``.data`` before its send was waited for
(``deallocate_pipeline_outputs``, the default, too). The request of a send holds the tensor, not its
memory, which the next allocation may get (Megatron-LM PR 4047). With
``overlap_p2p_comm_warmup_flush`` the last send of an evaluation is never waited for; gloo forgets
it when its request is gone, and the next stage waits for ever.
Symptom: silent; the next stage may receive other values. Seldom, as it depends on timing.
Fix: what is sent are aliases, kept until the request was waited for, so that nothing waits earlier
than before; a step ends when its sends have ended. Cost: one output of a stage, for the time of a
send.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:pipeline-sends"
_SENDS = ("send_prev", "send_next")
_unfinished: list[_Send] = []


class _Send:
    """The request of a send, with what is sent until it was waited for."""

    def __init__(self, request: Any, tensor: Any) -> None:
        self._kept = request, tensor
        _unfinished.append(self)

    def wait(self) -> None:
        """Wait, once: at another call gloo would wait for another message."""
        if self in _unfinished:
            request, _ = self._kept
            request.wait()
            _unfinished.remove(self)
            del self._kept


def send_aliases(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``_p2p_ops``, which starts messages and returns their requests by direction."""

    def _p2p_ops(**kwargs: Any) -> dict[str, Any]:
        for name in _SENDS:
            if kwargs[f"tensor_{name}"] is not None:
                kwargs[f"tensor_{name}"] = kwargs[f"tensor_{name}"].detach()
        requests = original(**kwargs)
        for name in _SENDS & requests.keys():
            requests[name] = _Send(requests[name], kwargs[f"tensor_{name}"])
        return requests

    return _p2p_ops


def end_sends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the interleaved schedule."""

    def forward_backward_pipelining_with_interleaving(*args: Any, **kwargs: Any) -> Any:
        _unfinished.clear()  # of a step that failed
        result = original(*args, **kwargs)
        while _unfinished:
            _unfinished[0].wait()
        return result

    return forward_backward_pipelining_with_interleaving


PATCHES = (
    Patch(
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
        send_aliases,
        OWNER,
        "an output lives until it is sent",
        expects=(
            "(tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
            "prev_pipeline_rank, next_pipeline_rank)"
        ),
        versions=">=0.16",
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        end_sends,
        OWNER,
        "a step ends when its sends have ended",
        versions=">=0.16",
    ),
)
