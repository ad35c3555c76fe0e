"""Defect: Megatron-FSDP gives all tensor-parallel ranks one dropout mask.

Where: ``FullyShardedDataParallel.sync_rng_states_across_tp_group`` of
``megatron.core.distributed.fsdp.mcore_fsdp_adapter`` copies all generators of the first
tensor-parallel rank to the others, those too that differ on purpose.
Symptom: silent; the attention heads of each rank, and with sequence parallelism its part of the
sequence, are dropped with the same mask.
Fix: each rank keeps the generators that Megatron tracks; the others are the same before and after.
Versions: 0.16 and newer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:fsdp-generators"
NEEDED_WITH = ("use_megatron_fsdp",)


def keep_own_generators(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``FullyShardedDataParallel.sync_rng_states_across_tp_group``."""

    def sync_rng_states_across_tp_group(self: Any) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        own = get_cuda_rng_tracker().get_states()
        original(self)
        get_cuda_rng_tracker().set_states(own)

    return sync_rng_states_across_tp_group


PATCHES = (
    Patch(
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter:"
        "FullyShardedDataParallel.sync_rng_states_across_tp_group",
        keep_own_generators,
        OWNER,
        "tensor-parallel ranks keep dropout masks of their own",
        expects="(self)",
        versions=">=0.16",
    ),
)
