"""What Megatron-FSDP (ZeRO 2 and 3) needs to shard FakeTensors."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from mindspeed.journal import Journal


def shard_fake_tensors(journal: Journal) -> None:
    """Meshes are of real tensors, stages are built whole, shards of other ranks are not checked.

    How a stage is built, and what checkpoints know of shards, does not show in a later step.
    """
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    from mindspeed.training import model

    index = FullyShardedDataParallel._init_dist_index

    def init_dist_index(chunk: Any, *args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return index(chunk, *args, **kwargs)

    journal.set(FullyShardedDataParallel, "_init_dist_index", init_dist_index, owner="planner")
    for name in ("update_uneven_dtensor_chunk_metadata", "validate_uneven_dtensor"):
        journal.set(param_and_grad_buffer, name, lambda shard: None, owner="planner")
    journal.set(model, "_never_whole", lambda args: False, owner="planner")
