"""Interleaved pipeline with P2P overlap corrupts gradients on gloo.

After an asynchronous send the schedule frees the sent activation by swapping its ``.data``
(``deallocate_pipeline_outputs``). NCCL and HCCL have enqueued the storage pointer by then; gloo
keeps only the tensor, so it sends whatever ``.data`` has become. A detached alias shares the
storage and is not swapped: what is sent stays alive until the send is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:pipeline-send"


def send_aliases(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_communicate`` so that it sends detached aliases."""

    def _communicate(
        self: Any,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        return original(
            self,
            tensor_send_next=_alias(tensor_send_next),
            tensor_send_prev=_alias(tensor_send_prev),
            **kwargs,
        )

    return _communicate


def _alias(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


PATCHES = (
    Patch(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        send_aliases,
        OWNER,
        "gloo must not lose an activation that is freed while it is being sent",
        expects="(self, tensor_send_next, tensor_send_prev, ...)",
    ),
)
