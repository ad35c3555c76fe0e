"""Megatron's ``FusedScaleMaskSoftmax`` with the feature on and with fusion off."""

from __future__ import annotations

import sys
from typing import Any

import torch

NAMES = (
    "scaled_masked_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
    "scaled_softmax_cuda",
)


def _attach() -> None:
    from mindspeed import session

    session.install().configure({"masked_softmax_fusion": True})


def fused_and_plain(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Probabilities and gradient of both, and which of our operators ran in the fused one."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func
    from torch.profiler import profile

    _attach()
    mask_type = AttnMaskType.causal if kind == "causal" else AttnMaskType.padding
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 2, 32, 32, generator=generator).bfloat16()
    dy = torch.randn(2, 2, 32, 32, generator=generator).bfloat16()
    hidden = torch.rand(2, 1, 32, 32, generator=generator) > 0.7
    mask = hidden if kind == "padding" else None

    def run(fusion: bool) -> list[torch.Tensor]:
        softmax = FusedScaleMaskSoftmax(
            False, True, mask_type, fusion, attention_mask_func, True, 0.5
        )
        x = scores.clone().requires_grad_()
        y = softmax(x, mask)
        y.backward(dy)
        return [y.detach(), x.grad]

    with profile() as log:
        fused = run(True)
    ran = {event.key for event in log.key_averages()}
    ours = {"forward": "scaled_masked_softmax", "backward": "scaled_masked_softmax_backward"}
    return fused, run(False), [k for k, name in ours.items() if f"mindspeed::{name}" in ran]


def modules_after_undo() -> list[Any]:
    """Which of the modules are left."""
    import mindspeed

    _attach()
    assert all(name in sys.modules for name in NAMES)
    mindspeed.undo()
    return [name for name in NAMES if name in sys.modules]
