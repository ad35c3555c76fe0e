"""Ranks that make the same schedule, and count the searches of their own."""

from __future__ import annotations

from mindspeed.features.registry import derived, resolve
from mindspeed.pipeline.schedule import auto
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.placement import Placement

RANKS, MICROBATCHES = 4, 8


def searched(limit, fault=None):
    """Searches of this rank, and the rows or the error that it got."""
    count, begin = [0], auto._Search.vees

    def counted(self):
        count[0] += 1
        if fault is not None:
            raise OSError(fault)
        begin(self)

    auto._Search.vees = counted
    auto._searched.cache_clear()
    try:
        plan = auto.fastest(
            Placement.v_shape(RANKS), MICROBATCHES, Costs(1.0, 1.1, 0.9), memory_limit=limit
        )
    except Exception as error:  # the test compares it
        return count[0], type(error).__name__, str(error)
    finally:
        auto._Search.vees = begin
    assert plan.name == "auto"
    return count[0], plan.rows, ""


def flags_read():
    """Searches while the flags of a job are read, and the schedule that is taken."""
    count, begin = [0], auto._Search.__init__

    def counted(self, placement, job, limit):
        count[0] += 1
        begin(self, placement, job, limit)

    auto._Search.__init__ = counted
    values = {
        "pipeline_model_parallel_size": RANKS,
        "global_batch_size": MICROBATCHES,
        "micro_batch_size": 1,
        "data_parallel_size": 1,
        "num_layers": 8,
        "pipeline_schedule": "auto",
        "pipeline_memory_limit": 0.6,
    }
    values |= derived(values)
    resolve(values, "cpu")
    return count[0], values["pipeline_schedule"]


def different(limits):
    """The schedule of a rank that asks for another one than the others."""
    import torch.distributed as dist

    return searched(limits[dist.get_rank()])
