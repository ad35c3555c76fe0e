"""Records the phase in which parts of an activation checkpoint run, inside rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mindspeed.instruments.instrument import PhaseTracker

Run = Callable[[torch.Tensor], torch.Tensor]


class Traced(torch.autograd.Function):
    """The identity; its backward uses its own forward, as that of an all-to-all does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Callable[[str], None]) -> torch.Tensor:
        ctx.note = note
        note("call")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.note("backward")
        return Traced.apply(grads[0], ctx.note), None


def phases(kind: str) -> list[tuple[str, str]]:
    """(what ran, phase) of one step of a function under this kind of checkpoint."""
    found: list[tuple[str, str]] = []
    x = torch.ones(3, requires_grad=True)
    with PhaseTracker() as tracker:

        def function(y: torch.Tensor) -> torch.Tensor:
            found.append(("function", tracker.current()))
            with torch.no_grad():
                found.append(("no_grad", tracker.current()))
            return Traced.apply(y.sin(), lambda what: found.append((what, tracker.current()))).sin()

        with torch.set_grad_enabled(True):
            _CHECKPOINTS[kind](function, x).sum().backward(create_graph=kind == "double backward")
    return found


def all_phases() -> dict[str, list[tuple[str, str]]]:
    """:func:`phases` of every kind."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return {kind: phases(kind) for kind in _CHECKPOINTS}


def _megatron(function: Run, x: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import checkpoint as megatron_checkpoint

    return megatron_checkpoint(function, False, x)  # type: ignore[no-any-return]


def _megatron_without_output(function: Run, x: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    manager = CheckpointWithoutOutput()
    y = manager.checkpoint(function, x)
    out = y * y
    manager.discard_output_and_register_recompute(out)
    return out  # type: ignore[no-any-return]


def _te(function: Run, x: torch.Tensor) -> torch.Tensor:
    from mindspeed.te.distributed import checkpoint as te_checkpoint

    return te_checkpoint(function, x)  # type: ignore[no-any-return]


_CHECKPOINTS: dict[str, Callable[[Run, torch.Tensor], torch.Tensor]] = {
    "none": lambda function, x: function(x),
    "double backward": lambda function, x: function(x),
    "torch reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "torch": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "megatron": _megatron,
    "megatron without output": _megatron_without_output,
    "te": _te,
}
KINDS = tuple(_CHECKPOINTS)
