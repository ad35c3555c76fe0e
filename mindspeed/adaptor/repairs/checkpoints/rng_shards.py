"""Defect: a ``torch_dist`` checkpoint cannot be loaded at another expert-parallel size.

Where: ``megatron.core.dist_checkpointing.serialization.load``. RNG states are stored as one sharded
object per tensor- and pipeline-parallel rank, and with expert parallelism per data-parallel rank
too. Megatron skips them after a change of the tensor- or pipeline-parallel size, but requires them
when only the expert- or data-parallel size has changed.
Symptom: loading fails because the objects do not exist.
Fix: keep the freshly seeded RNG states, as Megatron does in the other cases.
Versions: all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:rng-shards"
NEEDED_WITH = ("load", "num_experts")
logger = logging.getLogger("mindspeed")


def keep_seeded_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.load``."""

    def load(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
        from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

        given = bind(original, args, kwargs)
        state_dict = given["sharded_state_dict"]
        shard = state_dict.get("rng_state")
        if isinstance(shard, ShardedObject):
            stored = load_sharded_metadata(str(given["checkpoint_dir"]))
            if shard.unique_key not in stored:
                if not dist.is_initialized() or dist.get_rank() == 0:
                    logger.warning(
                        "the checkpoint has no RNG states for these parallel sizes: using --seed"
                    )
                given["sharded_state_dict"] = {
                    **state_dict,
                    "rng_state": LocalNonpersistentObject(shard.data),
                }
        return original(**given)

    return load


PATCHES = (
    Patch(
        "megatron.core.dist_checkpointing.serialization:load",
        keep_seeded_rng_state,
        OWNER,
        "a checkpoint loads after a change of the expert-parallel size alone",
        expects="(sharded_state_dict, checkpoint_dir, ...)",
    ),
)
