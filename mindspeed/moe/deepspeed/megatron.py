"""DeepSpeed's gate in the place of Megatron's router.

    for layer in moe_layers(model):               # mindspeed.adaptor.moe
        use_gate(layer, options, journal)

The weight of the gate is the router's, so checkpoints fit both. Losses reach the loss and the log
as the router's own do. Noise is drawn in training only, with Megatron's random states: it is the
same on ranks of a tensor-parallel group that hold the same tokens, and in a recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.journal import Journal, replace_method
from mindspeed.moe.deepspeed.gate import balance_loss, gumbel, route

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter

JITTER = 0.01


@dataclass(frozen=True)
class GateOptions:
    """How experts are chosen.

    Attributes:
        capacity: rows of an expert for a rank's number of tokens; None drops nothing.
        noise: "Jitter" of the gate's input, "RSample": experts are drawn, or "None".
        random_tokens: top-1 keeps random tokens, not the first ones.
        sinkhorn: experts are chosen from balanced scores.
    """

    capacity: Callable[[int], int] | None = None
    noise: str = "None"
    random_tokens: bool = True
    sinkhorn: bool = False


def use_gate(layer: MoELayer, options: GateOptions, journal: Journal) -> None:
    """Let a layer route with this gate until ``journal`` is undone."""
    forward = RouterForward(layer.router, options)
    replace_method(layer.router, "forward", lambda before: forward, journal)


class RouterForward:
    """The forward of one router.

    Attributes:
        collect: gets gates ``[n, E]``, first choices ``[n, E]`` and padding ``[n]`` of a chunk of
            the tokens; returns those of all of them, for the loss, or None while some are missing.
    """

    def __init__(self, router: TopKRouter, options: GateOptions) -> None:
        self._router, self._options = router, options
        self.collect: Callable[..., Any] | None = None

    def __call__(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens.

        Args:
            input: ``[s, b, h]``.
            padding_mask: bool ``[s, b]``, tokens that the losses leave out.

        Returns:
            Weights, fp32 ``[s * b, E]``, and bool ``[s * b, E]``, where they are not masked.
        """
        router, options = self._router, self._options
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        logits = router.apply_z_loss(self._logits(input), padding_mask=padding)
        gates = torch.softmax(logits, dim=1)
        with torch.no_grad():
            scores = self._scores(logits, gates)
            order = self._order(gates)
        capacity = None if options.capacity is None else options.capacity(gates.shape[0])
        routing = route(gates, scores, capacity, order)
        probs, first = routing.probs, routing.first
        if self.collect is not None:
            found = self.collect(gates, first, padding)
            if found is None:
                return probs, routing.routing_map
            gates, first, padding = found
        coefficient = router.get_aux_loss_coeff("aux_loss")
        if router.training and torch.is_grad_enabled() and coefficient > 0:
            group = router.tp_cp_group
            valid = None if padding is None else ~padding
            loss = balance_loss(gates, first, valid)
            # The mean of the ranks that share the micro-batch: their gradients are added.
            probs = router.attach_and_log_load_balancing_loss(
                probs,
                coefficient,
                loss * (coefficient / group.size()),
                "load_balancing_loss",
                group,
                valid_token_count=gates.shape[0] if valid is None else valid.sum(),
            )
        return probs, routing.routing_map

    def _logits(self, input: torch.Tensor) -> torch.Tensor:
        from megatron.core.transformer.moe.moe_utils import router_gating_linear

        router = self._router
        dtype = torch.float64 if router.config.moe_router_dtype == "fp64" else torch.float32
        if router.training and self._options.noise == "Jitter":
            with self._random():
                noise = torch.empty(input.shape, dtype=torch.float32, device=input.device)
                noise.uniform_(1 - JITTER, 1 + JITTER)
            input = input.to(torch.float32) * noise
        logits = router_gating_linear(input, router.weight, router.bias, dtype)
        return logits.view(-1, router.config.num_moe_experts)

    def _scores(self, logits: torch.Tensor, gates: torch.Tensor) -> list[torch.Tensor]:
        """Scores whose largest are chosen, ``[n, E]`` for each choice."""
        topk, training = self._router.topk, self._router.training
        if training and self._options.sinkhorn:
            from megatron.core.transformer.moe.moe_utils import sinkhorn

            return [sinkhorn(logits)] * topk
        if training and self._options.noise == "RSample":
            with self._random():
                uniform = torch.rand_like(logits)
            # The last choice is drawn, so with top-2 the best expert stays the first.
            return [gates] * (topk - 1) + [logits + gumbel(uniform)]
        return [gates] * topk

    def _order(self, gates: torch.Tensor) -> torch.Tensor | None:
        """A random order of the tokens, ``[n]``, if slots are given in one."""
        options = self._options
        if not (options.random_tokens and self._router.training and self._router.topk == 1):
            return None
        if options.capacity is None:
            return None
        with self._random():
            return torch.rand(gates.shape[0], device=gates.device).argsort()

    def _random(self) -> contextlib.AbstractContextManager[None]:
        """Random numbers of their own where tensor-parallel ranks hold different tokens."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if not self._router.config.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()  # type: ignore[no-any-return]
