"""The distributed optimizer can't load fp32 parameters it has saved in its own layout.

The main parameters of an fp32 model are views of the model's, and a ``dp_reshardable`` checkpoint
(the default of ``--use-distributed-optimizer``) is copied into them in place, which autograd
refuses: "a view of a leaf Variable that requires grad is being used in an in-place operation".
Loading needs no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:optimizer-resume"


def load_without_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``DistributedOptimizer.load_state_dict``."""

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            original(self, *args, **kwargs)

    return load_state_dict


PATCHES = (
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        load_without_gradients,
        OWNER,
        "an fp32 model resumes from the distributed optimizer's own checkpoint layout",
        expects="(self, state_dict)",
    ),
)
