"""A repair of Megatron's combined schedule: rows of a rank with one expert outlive their dispatch.

``--overlap-moe-expert-parallel-comm`` frees what a part of a layer was given as soon as its forward
has run. Experts are given the dispatched rows, and with several experts they sort them into new
memory, which they keep for backward. With one expert there is nothing to sort: the rows that were
freed are those that the weight gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.journal import Journal, replace_method


def keep_rows(layer: Any, journal: Journal) -> None:
    """Let the experts of Megatron's ``MoELayer`` have rows of their own.

    Args:
        layer: the module.
        journal: undoing it restores the layer.
    """
    replace_method(layer, "routed_experts_compute", lambda before: _of_own_rows(before), journal)


def _of_own_rows(before: Callable[..., Any]) -> Callable[..., Any]:
    def routed_experts_compute(hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        """``hidden [n, h]`` is freed by the caller; ``probs [n]`` is not."""
        return before(hidden.clone(), probs)

    return routed_experts_compute
