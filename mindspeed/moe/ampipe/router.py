"""A router that gets a micro-batch in chunks: routes at once, computes losses over the whole.

The load-balancing loss is a product of means over the micro-batch, so it is not a sum over chunks.
The first chunks are routed without losses; with the last one the router gets the logits of all, so
it computes, attaches and logs its losses, and counts tokens, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class ChunkedRouter:
    """One micro-batch of one of Megatron's ``TopKRouter``.

    Args:
        router: The module.
        chunks: How many there will be.
    """

    def __init__(self, router: Any, chunks: int) -> None:
        self._router, self._chunks = router, chunks
        self._logits: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []

    @contextlib.contextmanager
    def chunk(self) -> Iterator[None]:
        """The calls of the router inside are for the next chunk."""
        self._router.routing = self._routing  # on the instance: hides the method of the class
        try:
            yield
        finally:
            del self._router.routing

    def _routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Probabilities and map of a chunk, ``[n, experts]``, of logits ``[s, b, experts]``."""
        self._logits.append(logits)
        if padding_mask is not None:
            self._masks.append(padding_mask)
        router, route = self._router, type(self._router).routing
        if len(self._logits) < self._chunks:
            with _without_losses(router):
                return route(router, logits, padding_mask=padding_mask)
        masks = torch.cat(self._masks) if self._masks else None
        probs, routing_map = route(router, torch.cat(self._logits), padding_mask=masks)
        own = logits.shape[0] * logits.shape[1]
        return probs[-own:], routing_map[-own:]


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
