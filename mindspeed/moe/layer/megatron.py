"""Megatron's ``MoELayer`` executed as a program of stages.

    for layer in moe_layers(model):               # mindspeed.adaptor.moe
        change(layer, journal, overlap=True)      # the first change replaces the forward

Router, experts, shared experts and groups are those that Megatron has built. Its own stage methods
stay as they are: combined 1F1B and partial CUDA graphs call them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal, replace_method
from mindspeed.moe.dispatch.choice import Routing, choice_of
from mindspeed.moe.events import EventLog
from mindspeed.moe.interpreter import Stages, execute
from mindspeed.moe.layer.call import LayerCall
from mindspeed.moe.layer.replacements import REPLACEMENTS
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest, settled
from mindspeed.te.local_linears import convert_experts

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer


def change(layer: MoELayer, journal: Journal, **changes: Any) -> None:
    """Change what is asked of a layer; the first change replaces its forward.

    Args:
        journal: A feature's ``seams.journal``; undoing it restores the layer.
        **changes: Fields of :class:`LayerRequest`.
    """
    forward = vars(layer).get("forward")
    if not isinstance(forward, ProgramForward):
        forward = ProgramForward(layer, LayerRequest())
        replace_method(layer, "forward", lambda before: forward, journal)
    forward.request = replace(forward.request, **changes)
    if forward.request.overlap:
        convert_experts(layer.experts)


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

        Raises:
            ConfigError: in training with tensor parallelism without sequence parallelism.
        """
        layer = self._layer
        ranks = layer.attn_tp_group.size()
        if layer.training and ranks > 1 and not layer.config.sequence_parallel:
            raise ConfigError(
                f"experts train on {ranks} tensor-parallel ranks with sequence parallelism only: "
                "add --sequence-parallel"
            )
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if layer.moe_layer_recompute:
            return self._recomputed(hidden_states, padding_mask), None
        return self._execute(hidden_states, padding_mask), None

    def _execute(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> torch.Tensor:
        call = LayerCall(
            self._layer,
            settled(self.request, self._layer.config),
            hidden_states,
            padding_mask,
            self.log,
            self._shared_checkpoint(),
            self._row_multiple(),
        )
        program, stages = program_and_stages(call)
        chunk = call.chunk()
        execute(program, stages, [chunk], self.log)
        for function in call.at_end:
            function(chunk)
        return call.result(chunk)

    def _recomputed(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> torch.Tensor:
        from megatron.core import tensor_parallel

        layer, arguments = self._layer, (hidden_states, padding_mask)
        if not (layer.config.fp8 or layer.config.fp4):
            return tensor_parallel.checkpoint(self._execute, False, *arguments)  # type: ignore[no-any-return]
        from megatron.core.extensions.transformer_engine import te_checkpoint

        # Backward runs outside of the context that quantises; this restores it.
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(self._execute, False, tracker, layer.attn_tp_group, *arguments)  # type: ignore[no-any-return]

    def _shared_checkpoint(self) -> Callable[[], Any] | None:
        """Made for each call if the shared experts are computed again in backward."""
        if not self._layer.shared_experts_recompute:
            return None
        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        return partial(CheckpointWithoutOutput, fp8=self._layer.config.fp8)

    def _row_multiple(self) -> int:
        """Multiple of the rows sent to an expert; the all-gather dispatcher sends none."""
        config = self._layer.config
        if (
            not config.moe_router_padding_for_quantization
            or config.moe_token_dispatcher_type == "allgather"
        ):
            return 1
        from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

        return get_align_size_for_quantization(config)  # type: ignore[no-any-return]


def program_and_stages(call: LayerCall) -> tuple[Program, Stages]:
    """The program of a call, and the functions behind its steps."""
    config, request = call.layer.config, call.request
    choice = choice_of(config.moe_token_dispatcher_type, request)
    routing = Routing.of(config, request, call.layer.training)
    stages = call.stages(choice.stages(call.groups, routing))
    for replacement in REPLACEMENTS:
        stages = replacement(call, stages)
    return choice.program(request).without(*call.absent), stages


def keep_rows(layer: Any, journal: Journal) -> None:
    """Repair Megatron's combined schedule for ranks with one expert; undone with ``journal``.

    ``--overlap-moe-expert-parallel-comm`` frees what a part of a layer was given as soon as its
    forward has run. Several experts sort the dispatched rows into new memory, which they keep for
    backward; one expert has nothing to sort, and its weight gradient needs the rows that were
    freed.
    """
    replace_method(layer, "routed_experts_compute", _of_own_rows, journal)


def _of_own_rows(before: Callable[..., Any]) -> Callable[..., Any]:
    def routed_experts_compute(hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        """``hidden [n, h]`` is freed by the caller; ``probs [n]`` is not."""
        return before(hidden.clone(), probs)

    return routed_experts_compute
