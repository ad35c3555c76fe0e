"""Checks of features that run a plan in place of Megatron's own pipeline schedule.

Every rank makes and checks the plan of a full step when it checks the flags: a schedule
that does not exist for these sizes, or needs more memory than allowed, is refused before training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Megatron, Problem

if TYPE_CHECKING:
    from mindspeed.pipeline.schedule.plan import Plan
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest

_ORDER = "graphs are recorded in Megatron's order"
_HOOKS = "FSDP reduces gradients by hooks"
_BUDGET = "its budget is for Megatron's order of micro-batches"
_OWN = "overlap_moe_expert_parallel_comm"
EXCLUDES = {
    _OWN: "it has a schedule of its own",
    "hybrid_context_parallel": "it has a schedule of its own",
    "fine_grained_activation_offloading": "it expects Megatron's order of micro-batches",
    "use_megatron_fsdp": _HOOKS,
    "use_torch_fsdp2": _HOOKS,
    "use_ring_exchange_p2p": "messages are sent one by one",
    "enable_cuda_graph": _ORDER,
    "external_cuda_graph": _ORDER,
    "cuda_graph_impl": _ORDER,
    "adaptive_memory_optimization": _BUDGET,
    "adaptive_recompute_device_swap": _BUDGET,
    "num_microbatches_with_partial_activation_checkpoints": (
        "it depends on Megatron's order of micro-batches"
    ),
}
"""Arguments that no plan can be combined with, unless it has pairs."""
EXCLUDES_OF_PAIRS = {name: why for name, why in EXCLUDES.items() if name != _OWN}
"""The same of a plan that may have pairs of a forward and a backward."""
_DIVIDED = ("nanopipe", "zb-h1")
"""Kinds that are 1F1B with some backwards divided."""
_NOTHING_DIVIDED = (
    "has no effect, no backward is divided: a weight gradient that waits keeps more than the "
    "forward of a recomputed layer, which memory does not allow"
)
_DIVIDE_SOME = (
    "give a larger --pipeline-memory-limit, recompute fewer layers (--recompute-method block "
    "--recompute-num-layers N), or remove it"
)


def problems_of(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find why there is nothing to schedule.

    Args:
        flag: the flag with its value, for messages.
    """
    if (megatron.get("pipeline_model_parallel_size") or 1) == 1:
        yield Problem(
            flag,
            "there is one pipeline rank, so nothing to schedule",
            "give --pipeline-model-parallel-size, or remove it",
        )


def num_microbatches(megatron: Megatron) -> int | None:
    """Micro-batches of a full step; None if the arguments do not define it."""
    size = megatron.get("global_batch_size")
    each = (megatron.get("micro_batch_size") or 0) * (megatron.get("data_parallel_size") or 0)
    return size // each if size and each else None


def ramped_microbatches(megatron: Megatron) -> list[int]:
    """Micro-batches of the steps before the batch size is ramped up."""
    each = (megatron.get("micro_batch_size") or 0) * (megatron.get("data_parallel_size") or 0)
    ramp, full = megatron.get("rampup_batch_size"), megatron.get("global_batch_size")
    if not ramp or not full or not each:
        return []
    first, increment = int(ramp[0]), int(ramp[1])
    return sorted({max(size // each, 1) for size in range(first, full, max(increment, 1))})


def chunks_of(megatron: Megatron) -> int:
    """Model chunks of each pipeline rank."""
    return megatron.get("virtual_pipeline_model_parallel_size") or 1


def plan_of(flag: str, megatron: Megatron, request: ScheduleRequest) -> Plan | Problem | None:
    """The checked plan of a full step, or why there is none; None if m is unknown.

    The smaller steps of a ramp-up are checked, too.

    Args:
        flag: the flag with its value, for the message.
    """
    from mindspeed.pipeline.schedule.schedules import build_plan

    ranks, count = megatron.get("pipeline_model_parallel_size") or 1, num_microbatches(megatron)
    if ranks == 1 or count is None:
        return None
    chunks = request.placement(ranks, chunks_of(megatron)).chunks
    try:
        for smaller in ramped_microbatches(megatron):
            build_plan(request, ranks, chunks, smaller)
        plan = build_plan(request, ranks, chunks, count)
        whole = replace(request, kind="1f1b", swap=False)
        if request.kind in _DIVIDED and plan.rows == build_plan(whole, ranks, chunks, count).rows:
            return Problem(flag, _NOTHING_DIVIDED, _DIVIDE_SOME)
        return plan
    except ConfigError as error:
        return Problem(flag, str(error))


def has_pairs(megatron: Megatron) -> bool:
    """Whether forwards and backwards run at the same time, part by part."""
    return bool(megatron.get("moe_fb_overlap") or megatron.get(_OWN))


def limit_of(factor: float, ranks: int, chunks: int) -> float:
    """:func:`mindspeed.pipeline.schedule.schedules.memory_limit`, imported when it is needed."""
    from mindspeed.pipeline.schedule.schedules import memory_limit

    return memory_limit(factor, ranks, chunks)
