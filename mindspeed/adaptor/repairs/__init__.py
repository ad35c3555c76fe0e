"""Upstream defects that keep Megatron from running right on this device, mended one a module.

Each module holds ``PATCHES`` and says which defect, in which versions, and on which devices it
matters. A repair goes when upstream has fixed the defect: its ``versions`` range says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.repairs import (
    dataset_helpers,
    fused_kernels,
    local_spec,
    optimizer_resume,
    packed_batch,
    process_groups,
    rng_tracker,
    yarn,
)


def repairs_for(device: str, te: str) -> tuple[Patch, ...]:
    """The repairs needed on ``device`` (``cpu``, ``cuda``, ``npu``).

    Args:
        device: the device of this process.
        te: ``substitute`` or ``native`` Transformer Engine; the local spec's modules are only
            replaced where the substitute serves both specs.
    """
    patches = [*rng_tracker.PATCHES]
    if te == "substitute":
        patches += local_spec.PATCHES
    if device != "cuda":
        patches += [*fused_kernels.PATCHES, *dataset_helpers.PATCHES]
    if device == "cpu":
        patches += [*process_groups.PATCHES, *yarn.PATCHES]
    return tuple(patches)


def repairs_for_arguments(values: Mapping[str, Any]) -> tuple[Patch, ...]:
    """The repairs that only some of Megatron's options need.

    Args:
        values: Megatron's arguments.
    """
    patches = packed_batch.PATCHES if values.get("sft") else ()
    if values.get("use_distributed_optimizer"):
        patches += optimizer_resume.PATCHES
    return patches


def all_repairs() -> tuple[Patch, ...]:
    """Every repair of the library, for the contract check."""
    modules = (
        dataset_helpers,
        fused_kernels,
        local_spec,
        optimizer_resume,
        packed_batch,
        process_groups,
        rng_tracker,
        yarn,
    )
    return tuple(patch for module in modules for patch in module.PATCHES)
