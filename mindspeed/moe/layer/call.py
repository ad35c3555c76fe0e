"""One call of a layer: what its stages share, and the stages that are not the dispatcher's.

route        the router: which experts each token goes to, and with which probability
experts      the local experts on their rows
shared       the shared experts, whole; shared_fc1 and shared_fc2: in halves, up to the activation
             and the second linear layer
anchor       where the weight gradients of the experts are computed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mindspeed.moe.anchor import Anchor
from mindspeed.moe.dispatch.all_to_all import ExpertGroups
from mindspeed.moe.events import EventLog
from mindspeed.moe.first_call import arguments_of_first_call
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.request import LayerRequest
from mindspeed.te.local_linears import anchored, anchored_weights


class LayerCall:
    """One call.

    Args:
        shared_checkpoint: Of :class:`SharedHalves`.
        row_multiple: The rows that a rank sends an expert are filled up to a multiple of it.

    Attributes:
        layer: Megatron's ``MoELayer``.
        hidden: input, ``[s, b, h]``.
        padding_mask: bool ``[s, b]``, or None.
        log: gets the events; None: nobody reads them.
        absent: steps that this layer has no part for.
        at_end: called with each chunk whose program has run.
    """

    def __init__(
        self,
        layer: Any,
        request: LayerRequest,
        hidden: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        log: EventLog | None = None,
        shared_checkpoint: Callable[[], Any] | None = None,
        row_multiple: int = 1,
    ) -> None:
        self.layer, self.request, self.log = layer, request, log
        self.hidden, self.padding_mask = hidden, padding_mask
        self.absent = () if layer.use_shared_expert else ("shared", "shared_fc1", "shared_fc2")
        self._latent: int | None = getattr(layer.config, "moe_latent_size", None)
        dispatcher = layer.token_dispatcher
        self.groups = ExpertGroups(
            layer.config.num_moe_experts,
            dispatcher.ep_group,
            dispatcher.tp_group,
            dispatcher.tp_ep_group,
            request.wire_of(self._latent or layer.config.hidden_size),
        )
        self._shared = (
            SharedHalves(layer.shared_experts, shared_checkpoint)
            if layer.use_shared_expert
            else None
        )
        self.at_end: list[Callable[[Chunk], None]] = []
        self._row_multiple = row_multiple
        self._anchor: Anchor | None = None
        self._token: torch.Tensor | None = None

    def stages(self, dispatcher: Stages) -> Stages:
        """The dispatcher's stages and this layer's own."""
        own = {"route": self.route, "experts": self.experts}
        side = {
            "shared": self.shared,
            "shared_fc1": self.shared_fc1,
            "shared_fc2": self.shared_fc2,
            "anchor": self.place_anchor,
        }
        return replace(dispatcher, compute={**dispatcher.compute, **own}, side=side)

    def chunk(self) -> Chunk:
        """The tokens as experts get them."""
        hidden = self.to_experts(self.hidden)
        tensors = {"hidden": hidden.reshape(-1, hidden.shape[-1])}
        return Chunk(tensors=tensors, values={"layer": self.layer.layer_number})

    def to_experts(self, hidden: torch.Tensor) -> torch.Tensor:
        """What experts get of ``hidden [..., h]``: itself, or its projection if they are latent."""
        if not self._latent:
            return hidden
        projected, _ = self.layer.fc1_latent_proj(hidden)
        return projected  # type: ignore[no-any-return]

    def from_experts(self, output: torch.Tensor) -> torch.Tensor:
        """The inverse for their output: ``[..., h]``."""
        if not self._latent:
            return output
        projected, _ = self.layer.fc2_latent_proj(output)
        return projected  # type: ignore[no-any-return]

    def result(self, chunk: Chunk) -> torch.Tensor:
        """Routed and shared experts together, ``[s, b, h]``."""
        output = self.from_experts(chunk.tensors["output"].view(*self.hidden.shape[:-1], -1))
        shared = chunk.tensors.get("shared")
        return output if shared is None else output + shared

    def route(self, chunk: Chunk) -> None:
        """``probs`` and ``routing_map``, ``[n, experts]``."""
        probs, routing_map = self.layer.route(self.hidden, self.padding_mask)
        if self._row_multiple > 1:
            routing_map = filled_up(routing_map, self._row_multiple)
        chunk.tensors |= {"probs": probs, "routing_map": routing_map}

    def place_anchor(self, chunk: Chunk) -> None:
        """Choose where the weight gradients of the experts are computed."""
        self._anchor = Anchor(self.log)
        self._token = self._anchor.place(anchored_weights(self.layer.experts))

    def experts(self, chunk: Chunk) -> None:
        """``rows [m, h]``, sorted by local expert, to their results."""
        tensors = chunk.tensors
        tensors["rows"] = self.compute_experts(
            self.layer.experts,
            tensors["rows"],
            chunk.values["tokens_per_expert"],
            tensors["row_probs"],
        )

    def compute_experts(
        self,
        experts: Any,
        rows: torch.Tensor,
        sizes: torch.Tensor,
        probs: torch.Tensor,
        run: Callable[..., Any] | None = None,
    ) -> torch.Tensor:
        """The results of some experts, ``[m, h]``; weight gradients go to the anchor, if placed.

        Args:
            experts: All of the layer, or a range of them (:mod:`mindspeed.te.expert_range`).
            rows: ``[m, h]``, sorted by expert.
            sizes: int64 ``[experts]`` on the host, rows of each.
            probs: ``[m]``, by which results are weighted.
            run: Called in place of ``experts``.
        """
        if self._anchor is not None:
            rows = self._anchor.join(rows, self._token)
        with anchored(experts, None if self._token is None else self._anchor):
            out, bias = (run or experts)(rows, sizes, probs)
        assert bias is None
        return out  # type: ignore[no-any-return]

    def shared(self, chunk: Chunk) -> None:
        """The shared experts: ``shared [s, b, h]``."""
        chunk.tensors["shared"] = self.layer.shared_experts_compute(self.hidden)

    def shared_fc1(self, chunk: Chunk) -> None:
        """First half of the shared experts: ``shared [s, b, f]``."""
        assert self._shared is not None
        chunk.tensors["shared"] = self._shared.first(self.hidden)

    def shared_fc2(self, chunk: Chunk) -> None:
        """Second half of the shared experts: ``shared [s, b, h]``."""
        assert self._shared is not None
        chunk.tensors["shared"] = self._shared.second(chunk.tensors["shared"], self.hidden)


def filled_up(routing_map: torch.Tensor, multiple: int) -> torch.Tensor:
    """Give every expert a multiple of rows, as far as there are tokens.

    Args:
        routing_map: bool ``[n, experts]``.
        multiple: that the rows of an expert become a multiple of.

    Returns:
        bool ``[n, experts]``; an expert's first tokens that were not routed to it are added.
    """
    missing = -routing_map.sum(0) % multiple
    others = (~routing_map).cumsum(0)
    return routing_map | (others <= missing)


class SharedHalves:
    """The halves of one Megatron ``SharedExpertMLP``, computed by Megatron's own code.

    The first half runs its forward and ends where that calls ``linear_fc2``.

    Args:
        checkpoint: Megatron's ``CheckpointWithoutOutput``, if the first half is computed again in
            backward: its result is freed as soon as the second half has read it.
    """

    def __init__(self, shared_experts: Any, checkpoint: Callable[[], Any] | None = None) -> None:
        self._module = shared_experts
        self._checkpoint = None if checkpoint is None else checkpoint()

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """``linear_fc1`` and the activation: ``[s, b, h]`` to ``[s, b, f]``."""
        if self._checkpoint is None:
            return self._first(hidden)
        return self._checkpoint.checkpoint(self._first, hidden)  # type: ignore[no-any-return]

    def _first(self, hidden: torch.Tensor) -> torch.Tensor:
        module = self._module
        activated, *_ = arguments_of_first_call(module.linear_fc2, lambda: module(hidden))[0]
        return activated  # type: ignore[no-any-return]

    def second(self, activated: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``linear_fc2`` and the gate: ``[s, b, f]`` and the input ``[s, b, h]`` to the output."""
        module = self._module
        output, _ = module.linear_fc2(activated)
        if self._checkpoint is not None:
            self._checkpoint.discard_output_and_register_recompute(output)
        if not module.use_shared_expert_gate:
            return output  # type: ignore[no-any-return]
        gate = torch.sigmoid(torch.nn.functional.linear(hidden, module.gate_weight))
        return output * gate  # type: ignore[no-any-return]
