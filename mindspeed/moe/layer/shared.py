"""Shared experts in two halves: up to the activation, and the second linear layer.

What lies between the linear layers is Megatron's own code: the first half runs its forward and ends
where that calls ``linear_fc2``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SharedHalves:
    """The halves of one Megatron ``SharedExpertMLP``.

    Args:
        shared_experts: The module.
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
        fc2 = module.linear_fc2
        own = vars(fc2).get("forward")  # a feature's
        fc2.forward = _stop  # on the instance: hides the method of the class
        try:
            module(hidden)
        except _Reached as reached:
            return reached.value
        finally:
            if own is None:
                del fc2.forward
            else:
                fc2.forward = own
        raise RuntimeError("the shared experts did not call linear_fc2")

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


class _Reached(Exception):
    """The first half is done."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


def _stop(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    raise _Reached(x)
