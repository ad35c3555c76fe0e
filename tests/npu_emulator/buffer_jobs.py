"""Trains with sizes of HCCL's buffers, and says which groups got which."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any


def options_of_groups(flags: Sequence[str]) -> dict[str, Any]:
    """Configuration by description of the groups that Megatron makes, and what was printed."""
    import torch.distributed as dist

    from tests.npu_emulator import training_jobs

    made: dict[str, Any] = {}
    new_group = dist.new_group

    def watched(*args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("pg_options")
        made[kwargs.get("group_desc") or ""] = options and dict(options.hccl_config)
        return new_group(*args, **kwargs)

    dist.new_group = watched
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        result = training_jobs.train(flags)
    return {"groups": made, "text": text.getvalue(), "iteration": result["iteration"]}


def staged_over_hccl() -> dict[str, Any]:
    """Gather and scatter of host tensors in a world that has HCCL groups alone."""
    import torch
    import torch.distributed as dist

    from mindspeed import device
    from mindspeed.device.staged_group import staged
    from mindspeed.journal import Journal

    device.install(Journal())
    dist.init_process_group("hccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)), backend="hccl")
    other = staged(group, 4)
    mine = torch.arange(11.0) + 100 * rank
    parts = [torch.zeros(11) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, parts, 0, other)
    back = torch.zeros(11)
    dist.scatter(back, parts, 0, other)
    world = dist.distributed_c10d._world
    return {
        "gathered": parts and [part.tolist() for part in parts],
        "scattered": torch.equal(back, mine),
        "backends": sorted({backend for backend, _ in world.pg_map.values()}),
    }
