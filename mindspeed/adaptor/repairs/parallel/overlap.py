"""Defects of overlapped communication, which others do not wait for.

Defect: the interleaved schedule frees an output that is still being sent.

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
Versions: <0.18.

Defect: gradients may be reduced before they are computed, on several streams.

Where: ``megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup``. With
``--num-distributed-optimizer-instances`` above 1 and ``--overlap-grad-reduce`` reductions run on a
stream that waits for the default stream, and the default stream waits for it at the end, whichever
stream computes the gradients (Megatron-LM PR 3693).
Symptom: silent, on devices with streams; a backward on another stream, as those of overlapped
expert communication, may be reduced too early.
Fix: the stream of the reduction and the current stream wait for each other.
Versions: <0.17.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair

_SENDS = ("send_prev", "send_next")
_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup."

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


def wait_for_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_grad_sync``."""

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        if _has_own_stream(self):
            self.communication_stream.wait_stream(torch.cuda.current_stream())
        original(self, *args, **kwargs)

    return start_grad_sync


def wait_for_reduction(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_grad_sync``."""

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _has_own_stream(self):
            torch.cuda.current_stream().wait_stream(self.communication_stream)

    return finish_grad_sync


def _has_own_stream(group: Any) -> bool:
    options = group.ddp_config
    return options.overlap_grad_reduce and options.num_distributed_optimizer_instances > 1


PATCHES = (
    repair(
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
        send_aliases,
        "an output lives until it is sent",
        expects=(
            "(tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
            "prev_pipeline_rank, next_pipeline_rank)"
        ),
        versions="<0.18",
    ),
    repair(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        end_sends,
        "a step ends when its sends have ended",
        versions="<0.18",
    ),
    repair(
        _GROUP + "start_grad_sync",
        wait_for_gradients,
        "a reduction waits for the stream that computes gradients",
        expects={">=0.16": "(self, force_all_reduce)", "<0.16": "(self)"},
        versions="<0.17",
    ),
    repair(
        _GROUP + "finish_grad_sync",
        wait_for_reduction,
        "the stream that goes on waits for the reduction",
        expects={">=0.16": "(self, force_all_reduce)", "<0.16": "(self)"},
        versions="<0.17",
    ),
)
