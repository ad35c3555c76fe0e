"""Defect: the distributed optimizer of an fp32 model cannot load its own checkpoint.

Where: ``load_state_dict`` and ``load_parameter_state`` of ``megatron.core.optimizer``. The main
parameters of an fp32 model are views of the model's; ``dp_reshardable`` checkpoints (the default
of ``--use-distributed-optimizer``) and the file of ``--ckpt-format torch`` are copied into them in
place.
Symptom: "a view of a leaf Variable that requires grad is being used in an in-place operation".
Fix: load under ``torch.no_grad``.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:optimizer-resume"
NEEDED_WITH = ("use_distributed_optimizer",)


def load_without_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_megatron_optimizer``: what it returns loads without gradients."""

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        for name in ("load_state_dict", "load_parameter_state"):
            if hasattr(optimizer, name):
                setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))
        return optimizer

    return get_megatron_optimizer


PATCHES = (
    Patch(
        "megatron.core.optimizer:get_megatron_optimizer",
        load_without_gradients,
        OWNER,
        "an fp32 model resumes from the distributed optimizer's own checkpoint layout",
        expects="(config, model_chunks, ...)",
    ),
)
