"""Defect: mcore-bridge takes all layers on an NPU for those of the original MindSpeed.

Where: ``mcore_bridge.tuners.lora`` (1.6.5, lines 204 to 291 and 419), behind LoRA of ms-swift. The
original's linear layers are Megatron's native ones, with sizes of all ranks and private norms;
those of a Transformer Engine have its sizes and return the normalised input.
Symptom: ``megatron sft --tuner_type lora`` on an NPU ends with "NPU LoRA path requires base_layer
to expose post-norm activations", or with shapes of adapters that do not fit.
Fix: that module builds adapters as for any other Transformer Engine.
"""

from __future__ import annotations

from types import ModuleType

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.journal import Journal

OWNER = "bridge adapters"
_NAME = "is_torch_npu_available"


def install(hooks: PostImportHooks, journal: Journal) -> None:
    """Answer the module that there is no NPU, when it is imported."""

    def lora(module: ModuleType) -> None:
        if hasattr(module, _NAME):
            journal.set(module, _NAME, lambda: False, owner=OWNER)

    hooks.when_imported("mcore_bridge.tuners.lora", lora)
