"""The weight-gradient anchor: weight gradients of experts, computed while the dispatch returns.

    anchor = Anchor()
    token = anchor.place(weights)          # in the dispatch window of forward
    x = anchor.join(x, token)              # input of the experts
    ...                                    # the layers give their computations: anchor.put(...)

The backward of the experts computes input gradients only. The computations of the weight gradients
wait in the anchor, whose own backward runs where it was placed, mirrored: after the reverse of the
dispatch is launched and before it is waited for. The gradients reach the parameters through
autograd, so hooks (distributed data parallelism) see them as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed.moe.events import EventKind, EventLog
from mindspeed.spmd import Passes, Token, typed

Computation = Callable[[], Sequence[torch.Tensor | None]]


class Anchor:
    """The weight gradients of the experts of one call of a layer."""

    def __init__(self, log: EventLog | None = None) -> None:
        self._log = log
        self._weights: tuple[torch.Tensor, ...] = ()
        self._waiting: list[tuple[Sequence[torch.Tensor], Computation]] = []

    def place(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Choose the place, before the experts run; None if no gradient is wanted.

        Args:
            weights: Of all experts of the layer; frozen ones are left out.
        """
        self._weights = tuple(weight for weight in weights if weight.requires_grad)
        if not self._weights or not torch.is_grad_enabled():
            return None
        return _Place.apply(self, *self._weights)  # type: ignore[no-any-return]

    def join(self, x: torch.Tensor, token: torch.Tensor | None) -> torch.Tensor:
        """Tie the place to the input of the experts ``x``, which is returned."""
        return x if token is None else _Join.apply(x, token)  # type: ignore[no-any-return]

    def put(self, weights: Sequence[torch.Tensor], compute: Computation) -> None:
        """Take the computation of the gradients of some weights.

        Args:
            weights: Parameters that were placed, or frozen ones.
            compute: Returns a gradient, a placeholder or None for each.
        """
        self._waiting.append((weights, compute))

    def compute(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the placed weights, in their order."""
        if self._log is not None:
            self._log.add("backward", EventKind.COMPUTE, "weight_gradients")
        found: dict[int, torch.Tensor] = {}
        for weights, compute in self._waiting:
            for weight, grad in zip(weights, compute(), strict=True):
                if grad is not None:
                    known = found.get(id(weight))
                    found[id(weight)] = grad if known is None else known + grad
        self._waiting.clear()
        return tuple(found.get(id(weight)) for weight in self._weights)


@typed(Token())
class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Anchor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.anchor = anchor
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.anchor.compute()


@typed(Passes())
class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.like = token.new_zeros(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0], ctx.like
