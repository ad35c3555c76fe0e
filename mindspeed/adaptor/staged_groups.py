"""Groups for host tensors in the distributed optimizer, without Gloo.

``DistributedOptimizer`` gathers its states on the first data-parallel rank to save them, and
scatters them to load them, in the formats that keep whole states (``--ckpt-format torch``;
``--distrib-optim-fully-reshardable-mem-efficient``), through the group in its attribute
``data_parallel_group_gloo``, which is empty when Gloo groups are disabled.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("mindspeed")


def use_staged_groups(optimizer: Any, slice_size: int) -> Any:
    """Give every distributed optimizer in ``optimizer`` a staged group; returns it. Collective.

    Args:
        optimizer: What ``get_megatron_optimizer`` returned.
        slice_size: Elements on the device at a time; at most the largest shard is used.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from mindspeed.device.staged_group import StagedGroup, staged

    made: dict[tuple[int, ...], StagedGroup] = {}
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    sharded = [p for p in parts if isinstance(p, DistributedOptimizer) and hasattr(p, "buffers")]
    size = _at_most_the_largest_shard(sharded, slice_size)
    for part in sharded:
        ranks = tuple(dist.get_process_group_ranks(part.data_parallel_group))
        if ranks not in made:
            made[ranks] = staged(part.data_parallel_group, size)
        part.data_parallel_group_gloo = made[ranks]
    return optimizer


def _at_most_the_largest_shard(sharded: list[Any], slice_size: int) -> int:
    largest = max(
        (
            bucket.grad_data.numel() // part.data_parallel_group.size()
            for part in sharded
            for buffer in part.buffers
            for bucket in buffer.buckets
        ),
        default=0,
    )
    if not 0 < largest < slice_size:
        return slice_size
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "--hccl-slice-size %s is more than the largest shard of a bucket: %s are used",
            f"{slice_size:,}",
            f"{largest:,}",
        )
    return largest
