"""A hook on the routers of a model chunk, called once for each micro-batch of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_routing(router: torch.nn.Module, use: Callable[[torch.Tensor], None]) -> None:
    """Call ``use`` with every routing of a router that a training learns from.

    Evaluation is left out. Of a layer that is computed again only the second forward has gradients,
    so each micro-batch counts once.

    Args:
        router: Megatron's ``TopKRouter``.
        use: gets which experts each token goes to, bool ``[tokens, experts]``; tokens that were
            dropped have fewer.
    """

    def hook(router: torch.nn.Module, inputs: Any, output: Any) -> None:
        if router.training and torch.is_grad_enabled():
            use(output[1])

    router.register_forward_hook(hook)
