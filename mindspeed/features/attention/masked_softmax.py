"""Masked softmax as one operator: on, unless ``--no-masked-softmax-fusion`` is given.

Megatron's ``FusedScaleMaskSoftmax`` imports CUDA extensions for it that exist on NVIDIA GPUs only,
and ends in an ImportError without them. This puts the operator in their place. The library's own
attention does not need it; modules that still call Megatron's softmax do.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class MaskedSoftmax(Feature, level=1):
    """Scaling, mask and softmax of attention scores as one operator."""

    def enabled(self, megatron: Megatron) -> bool:
        return bool(megatron.get("masked_softmax_fusion"))

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.te.softmax_extensions import modules

        for name, module in modules().items():
            if importlib.util.find_spec(name) is None:
                seams.journal.set_module(name, module, owner=self.name)
