"""Megatron's ``MoELayer`` executed as a program of stages.

    for layer in moe_layers(model):               # mindspeed.adaptor.moe
        change(layer, journal, overlap=True)      # the first change replaces the forward

Router, experts, shared experts and groups are those that Megatron has built. Its own stage methods
stay as they are: combined 1F1B and partial CUDA graphs call them one by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.journal import Journal, replace_method
from mindspeed.moe.anchor import Anchor
from mindspeed.moe.dispatch.all_to_all import ExpertGroups
from mindspeed.moe.dispatch.choice import Choice, Routing, choice_of
from mindspeed.moe.events import EventLog
from mindspeed.moe.interpreter import Chunk, Stages, execute
from mindspeed.moe.layer.shared import SharedHalves
from mindspeed.moe.request import LayerRequest
from mindspeed.te.weight_gradient import anchored

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer


def change(layer: MoELayer, journal: Journal, **changes: Any) -> None:
    """Change what is asked of a layer; the first change replaces its forward.

    Args:
        layer: Megatron's module.
        journal: A feature's ``seams.journal``; undoing it restores the layer.
        **changes: Fields of :class:`LayerRequest`.
    """
    forward = vars(layer).get("forward")
    if not isinstance(forward, ProgramForward):
        forward = ProgramForward(layer, LayerRequest())
        replace_method(layer, "forward", lambda before: forward, journal)
    forward.request = replace(forward.request, **changes)


class ProgramForward:
    """The forward of one layer.

    Attributes:
        request: what the features ask; read at every call.
        log: gets the events of every call, for tests and pictures.
    """

    def __init__(self, layer: MoELayer, request: LayerRequest) -> None:
        self.request = request
        self.log: EventLog | None = None
        self._layer = layer

    def __call__(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Compute the layer; the arguments are those of Megatron's.

        Args:
            hidden_states: ``[s, b, h]``.
            intermediate_tensors: of partial CUDA graphs; None.
            padding_mask: bool ``[b, s]``.

        Returns:
            ``[s, b, h]``, and no bias.
        """
        layer = self._layer
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if not layer.moe_layer_recompute:
            return self._execute(hidden_states, padding_mask), None
        from megatron.core import tensor_parallel

        return tensor_parallel.checkpoint(self._execute, False, hidden_states, padding_mask), None

    def _execute(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> torch.Tensor:
        call = _Call(self._layer, hidden_states, padding_mask, self.log)
        choice = choice_of(self._layer.config.moe_token_dispatcher_type, self.request)
        program = choice.program(self.request).without(*call.absent)
        chunk = Chunk(tensors={"hidden": hidden_states.reshape(-1, hidden_states.shape[-1])})
        execute(program, call.stages(choice, self.request), [chunk], self.log)
        return call.result(chunk)


class _Call:
    """One call of a layer: what its stages share."""

    def __init__(
        self,
        layer: MoELayer,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        log: EventLog | None,
    ) -> None:
        self._layer, self._hidden, self._mask, self._log = layer, hidden_states, padding_mask, log
        self._shared = SharedHalves(layer.shared_experts) if layer.use_shared_expert else None
        self._anchor: Anchor | None = None
        self._token: torch.Tensor | None = None
        self.absent = () if self._shared else ("shared", "shared_fc1", "shared_fc2")

    def stages(self, choice: Choice, request: LayerRequest) -> Stages:
        """The dispatcher's, the router, the experts and what is computed beside them."""
        layer = self._layer
        dispatcher = layer.token_dispatcher
        groups = ExpertGroups(
            layer.config.num_moe_experts,
            dispatcher.ep_group,
            dispatcher.tp_group,
            dispatcher.tp_ep_group,
        )
        stages = choice.stages(groups, Routing.of(layer.config, request))
        return Stages(
            compute={**stages.compute, "route": self._route, "experts": self._experts},
            communicate=stages.communicate,
            side={
                "shared": self._shared_whole,
                "shared_fc1": self._shared_fc1,
                "shared_fc2": self._shared_fc2,
                "anchor": self._place,
            },
        )

    def result(self, chunk: Chunk) -> torch.Tensor:
        """Routed and shared experts together, ``[s, b, h]``."""
        output = chunk.tensors["output"].view(self._hidden.shape)
        shared = chunk.tensors.get("shared")
        return output if shared is None else output + shared

    def _route(self, chunk: Chunk) -> None:
        probs, routing_map = self._layer.route(self._hidden, self._mask)
        chunk.tensors |= {"probs": probs, "routing_map": routing_map}

    def _place(self, chunk: Chunk) -> None:
        self._anchor = Anchor(self._log)
        self._token = self._anchor.place(list(self._layer.experts.parameters()))

    def _experts(self, chunk: Chunk) -> None:
        tensors, anchor = chunk.tensors, self._anchor
        rows = tensors["rows"] if anchor is None else anchor.join(tensors["rows"], self._token)
        with anchored(self._layer.experts, anchor if self._token is not None else None):
            out, bias = self._layer.experts(
                rows, chunk.values["tokens_per_expert"], tensors["row_probs"]
            )
        assert bias is None
        tensors["rows"] = out

    def _shared_whole(self, chunk: Chunk) -> None:
        chunk.tensors["shared"] = self._layer.shared_experts_compute(self._hidden)

    def _shared_fc1(self, chunk: Chunk) -> None:
        assert self._shared is not None
        chunk.tensors["shared"] = self._shared.first(self._hidden)

    def _shared_fc2(self, chunk: Chunk) -> None:
        assert self._shared is not None
        chunk.tensors["shared"] = self._shared.second(chunk.tensors["shared"], self._hidden)
