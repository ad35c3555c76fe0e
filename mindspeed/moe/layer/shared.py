"""Shared experts in two halves: up to the activation, and the second linear layer.

What lies between the linear layers is Megatron's own code: the first half runs its forward and ends
where that calls ``linear_fc2``.
"""

from __future__ import annotations

from typing import Any

import torch


class SharedHalves:
    """The halves of one Megatron ``SharedExpertMLP``."""

    def __init__(self, shared_experts: Any) -> None:
        self._module = shared_experts

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """``linear_fc1`` and the activation: ``[s, b, h]`` to ``[s, b, f]``."""
        module = self._module
        fc2 = module.linear_fc2
        fc2.forward = _stop  # on the instance: hides the method of the class
        try:
            module(hidden)
        except _Reached as reached:
            return reached.value
        finally:
            del fc2.forward
        raise RuntimeError("the shared experts did not call linear_fc2")

    def second(self, activated: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``linear_fc2`` and the gate: ``[s, b, f]`` and the input ``[s, b, h]`` to the output."""
        module = self._module
        output, _ = module.linear_fc2(activated)
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
