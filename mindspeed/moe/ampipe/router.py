"""A router that gets a micro-batch in chunks: routes at once, computes losses over the whole.

The load-balancing loss is a product of means over the micro-batch, so it is not a sum over chunks.
The first chunks are routed without losses; with the last one the router gets the logits of all, so
it computes, attaches and logs its losses, and counts tokens, once. DeepSpeed's gate chooses and
drops chunk by chunk, and gets the gates of all for its losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed.moe.deepspeed.megatron import RouterForward


class ChunkedRouter:
    """One micro-batch of one of Megatron's ``TopKRouter``, or of DeepSpeed's gate in its place.

    Args:
        router: The module.
        chunks: How many there will be.
    """

    def __init__(self, router: Any, chunks: int) -> None:
        self._router, self._chunks = router, chunks
        self._logits: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []
        self._gates: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def chunk(self) -> Iterator[None]:
        """The calls of the router inside are for the next chunk."""
        gate = vars(self._router).get("forward")
        hidden = {"routing": self._routing}  # on the instance: hide the methods of the class
        if isinstance(gate, RouterForward):
            hidden = {"apply_z_loss": self._apply_z_loss}
            gate.collect = self._collect
        vars(self._router).update(hidden)
        try:
            yield
        finally:
            for name in hidden:
                del vars(self._router)[name]
            if isinstance(gate, RouterForward):
                gate.collect = None

    def _routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Probabilities and map of a chunk, ``[n, experts]``, of logits ``[s, b, experts]``."""
        router, route = self._router, type(self._router).routing
        if not self._is_last(logits, padding_mask):
            with _without_losses(router):
                return route(router, logits, padding_mask=padding_mask)
        probs, routing_map = route(router, torch.cat(self._logits), padding_mask=self._mask())
        own = logits.shape[0] * logits.shape[1]
        return probs[-own:], routing_map[-own:]

    def _apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attach the loss of all chunks to the logits ``[n, experts]`` of the last one."""
        if not self._is_last(logits, padding_mask):
            return logits
        router, apply = self._router, type(self._router).apply_z_loss
        whole = apply(router, torch.cat(self._logits), padding_mask=self._mask())
        return whole[-logits.shape[0] :]  # type: ignore[no-any-return]

    def _collect(
        self, gates: torch.Tensor, first: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Gates and first choices of all chunks, once the last one is there."""
        self._gates.append((gates, first))
        if len(self._gates) < self._chunks:
            return None
        all_gates, all_first = map(torch.cat, zip(*self._gates, strict=True))
        return all_gates, all_first, self._mask()

    def _is_last(self, logits: torch.Tensor, padding_mask: torch.Tensor | None) -> bool:
        self._logits.append(logits)
        if padding_mask is not None:
            self._masks.append(padding_mask)
        return len(self._logits) == self._chunks

    def _mask(self) -> torch.Tensor | None:
        return torch.cat(self._masks) if self._masks else None


@contextlib.contextmanager
def _without_losses(router: Any) -> Iterator[None]:
    hidden = {
        "apply_z_loss": lambda logits, padding_mask=None: logits,
        "is_aux_loss_enabled": lambda: False,
        "_apply_expert_bias": lambda routing_map, padding_mask=None: None,
    }
    vars(router).update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del vars(router)[name]
