"""A ``torch_dist`` checkpoint cannot be read after switching expert parallelism on or off.

Megatron stores the states of the random number generators in pieces: one for every tensor and
pipeline position, and with expert parallelism one for every data-parallel rank too. It leaves the
pieces out after a change of tensor or pipeline parallelism, but requires pieces that do not exist
when only the expert- or data-parallel size has changed, and cannot load anything. The repair keeps
the generators as they are seeded, as Megatron does in the other cases.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:rng-shards"
logger = logging.getLogger("mindspeed")


def keep_what_is_not_stored(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.load``."""

    def load(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
        from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

        given = bind(original, args, kwargs)
        wanted = given["sharded_state_dict"]
        piece = wanted.get("rng_state")
        if isinstance(piece, ShardedObject):
            stored = load_sharded_metadata(str(given["checkpoint_dir"]))
            if piece.unique_key not in stored:
                if not dist.is_initialized() or dist.get_rank() == 0:
                    logger.warning("other parallel sizes: the random number generators start anew")
                given["sharded_state_dict"] = {
                    **wanted,
                    "rng_state": LocalNonpersistentObject(piece.data),
                }
        return original(**given)

    return load


PATCHES = (
    Patch(
        "megatron.core.dist_checkpointing.serialization:load",
        keep_what_is_not_stored,
        OWNER,
        "a checkpoint is read after a change of the expert-parallel size alone",
        expects="(sharded_state_dict, checkpoint_dir, ...)",
    ),
)
