"""The parts of Megatron's ``MoELayer``, run by the steps of a program.

    preprocess              count! permute
    dispatch                dispatch! gather!
    routed_experts_compute  arrange experts disarrange
    combine                 scatter! combine!
    postprocess             unpermute

Pairs of a forward and a backward (``--moe-fb-overlap``) call these methods one by one, between the
parts of another micro-batch, each with tensors that are detached from the part before; Megatron
calls router and shared experts itself. By a program, experts can have a save policy here, too.

A layer comes forward with one micro-batch at a time, so there is one call that is not complete.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mindspeed.journal import Journal, replace_method
from mindspeed.moe.interpreter import Chunk, Stages, execute
from mindspeed.moe.layer.call import LayerCall
from mindspeed.moe.layer.megatron import ProgramForward, change, program_and_stages
from mindspeed.moe.program import Program
from mindspeed.moe.request import settled

METHODS = ("preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")


def change_parts(layer: Any, journal: Journal, **changes: Any) -> None:
    """Change what is asked of a layer, in its parts and where it runs as a whole.

    Args:
        journal: A feature's ``seams.journal``; undoing it restores the layer.
        **changes: Fields of :class:`LayerRequest`.
    """
    change(layer, journal, in_parts=True, **changes)
    parts = LayerParts(layer, vars(layer)["forward"])
    for name in METHODS:
        replace_method(layer, name, partial(_instead, getattr(parts, name)), journal)


def _instead(method: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    return method


class LayerParts:
    """The parts of one layer.

    Args:
        whole: Its forward: its request and its log are those of the parts.
    """

    def __init__(self, layer: Any, whole: ProgramForward) -> None:
        self._layer, self._whole = layer, whole
        self._call: LayerCall
        self._chunk: Chunk
        self._stages: Stages
        self._programs: dict[str, Program]

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort the tokens by expert.

        Args:
            hidden_states: ``[s, b, h]``.
            probs: ``[n, experts]``.
            routing_map: bool ``[n, experts]``.

        Returns:
            Rows ``[copies, h]`` and their probabilities ``[copies]``.
        """
        whole = self._whole
        request = settled(whole.request, self._layer.config)
        call = self._call = LayerCall(self._layer, request, hidden_states, log=whole.log)
        program, self._stages = program_and_stages(call)
        parts = program.without("route", "shared").parts("experts")
        self._programs = dict(zip(METHODS, parts, strict=True))
        self._chunk = call.chunk()
        self._chunk.tensors |= {"probs": probs, "routing_map": routing_map}
        self._run("preprocess")
        return self._taken("rows"), self._taken("row_probs")

    def dispatch(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows ``[copies, h]``, ``probs [copies]`` to their experts: ``[m, h]``, ``[m]``."""
        self._run("dispatch", rows=rows, row_probs=probs)
        return self._taken("rows"), self._taken("row_probs")

    def routed_experts_compute(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The results of the experts on ``rows [m, h]`` by ``probs [m]``: ``[m, h]``, no bias."""
        self._run("routed_experts_compute", rows=rows, row_probs=probs)
        self._taken("row_probs")
        return self._taken("rows"), None

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the results ``[m, h]`` to the ranks of their tokens: ``[copies, h]``."""
        self._run("combine", rows=rows)
        return self._taken("rows")

    def postprocess(self, rows: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        """Sum up the results ``rows [copies, h]``, and ``shared [s, b, h]``: ``[s, b, h]``."""
        self._run("postprocess", rows=rows)
        call, chunk = self._call, self._chunk
        del self._call, self._chunk, self._stages
        if shared is not None:
            chunk.tensors["shared"] = shared
        for function in call.at_end:
            function(chunk)
        return call.result(chunk)

    def _run(self, name: str, **tensors: torch.Tensor) -> None:
        self._chunk.tensors |= tensors
        execute(self._programs[name], self._stages, [self._chunk], self._whole.log)

    def _taken(self, name: str) -> torch.Tensor:
        """A tensor that the next part gets detached; Megatron frees some as soon as it has run."""
        return self._chunk.tensors.pop(name)
