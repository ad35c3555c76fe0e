"""Recomputation that a schedule places: in bubbles, in advance, or by a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Megatron, Problem
from mindspeed.features.memory import activation_memory
from mindspeed.features.memory.activation_memory import attach_plan
from mindspeed.features.pipeline import plans
from mindspeed.pipeline.noop_layers import indices_of
from mindspeed.pipeline.placed_stages import layers_of_stages

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.memory.layer_rules import ChunkLayers
    from mindspeed.memory.plan import ChunkPlan

When = Literal["bubble", "advance"]

_BOTH = "both decide which layers are recomputed"
_AGAIN = "a second run would change scaling factors"
LAYER_EXCLUDES = {
    **activation_memory.EXCLUDES,
    "activation_plan": _BOTH,
    "optimize_recomp_communication_level": _BOTH,
    "adaptive_recompute_device_size": _BOTH,
    "adaptive_recompute_device_swap": _BOTH,
    "adaptive_memory_optimization": _BOTH,
    "moe_layer_recompute": _BOTH,
    "swap_attention": "layers that are recomputed leave nothing to swap",
    "distribute_saved_activations": "inputs of layers stay where they are",
    "fp8": _AGAIN,
    "fp4": _AGAIN,
}
"""Arguments that layers which a schedule recomputes exclude."""
EXCLUDES = {**LAYER_EXCLUDES, **plans.EXCLUDES}


def problems_of(flag: str, when: When, megatron: Megatron, *, chunks: str) -> Iterator[Problem]:
    """Find what neither flag can run with.

    Args:
        flag: Of the feature.
        when: the time of recomputation in the schedule.
        chunks: What it needs several model chunks of a rank for.
    """
    problems = list(plans.problems_of(flag, megatron))
    yield from problems
    if plans.chunks_of(megatron) == 1:
        yield Problem(
            flag,
            f"needs several model chunks on each pipeline rank: {chunks}",
            "add --num-layers-per-virtual-pipeline-stage, or remove it",
        )
    elif not problems:
        from mindspeed.pipeline.schedule.costs import Costs
        from mindspeed.pipeline.schedule.schedules import ScheduleRequest

        costs = Costs(**_costs(None, megatron, per_rank=False))
        found = plans.plan_of(flag, megatron, ScheduleRequest(recompute=when, costs=costs))
        if isinstance(found, Problem):
            yield found


def attach_recomputation(
    seams: Seams,
    feature: str,
    flag: str,
    megatron: Megatron,
    when: When,
    number: int | None,
) -> None:
    """Let a schedule decide when the layers of every model chunk are recomputed.

    Args:
        flag: Its flag, for messages.
        when: the time of recomputation in the schedule.
        number: How many layers of every chunk; None: all.
    """
    per_rank = number is not None and bool(megatron.get("enable_recompute_layers_per_pp_rank"))
    changes = _costs(number, megatron, per_rank=per_rank)

    def schedule(previous: Any) -> Any:
        from mindspeed.pipeline.schedule.megatron import scheduled

        pipeline = scheduled(previous, recompute=when)
        costs = replace(pipeline.request.costs, **changes)
        return recomputing(scheduled(pipeline, costs=costs))

    drop_layers(seams, feature, flag, megatron, number, per_rank=per_rank)
    seams.schedule.add(schedule, owner=feature)


def drop_layers(
    seams: Seams,
    feature: str,
    flag: str,
    megatron: Megatron,
    number: int | None = None,
    *,
    per_rank: bool = False,
) -> None:
    """Let a schedule recompute layers of every model chunk.

    Args:
        flag: Its flag, for messages.
        number: How many layers; None: all.
        per_rank: Count them over the chunks of a rank.
    """

    def plan(sites: dict[str, dict[str, Any]], layers: ChunkLayers) -> ChunkPlan:
        from mindspeed.memory.layer_rules import plan_of
        from mindspeed.memory.plan import LAYER, SiteAction

        chosen = layers.first(number, of_rank=per_rank)
        return plan_of(chosen, lambda layer: (LAYER,), SiteAction.RECOMPUTE)

    attach_plan(seams, feature, flag, megatron, plan)


def recomputing(pipeline: Any) -> Any:
    """A ``ScheduledPipeline`` that runs plans with ``Fc`` and ``R``; see :func:`drop_layers`."""
    return replace(pipeline, recomputation=_of_chunk)


def _costs(number: int | None, megatron: Megatron, *, per_rank: bool) -> dict[str, Any]:
    """Fields of ``Costs``: how much of a chunk is recomputed, and how large each stage is."""
    counts = _computing_layers(megatron)
    mean = sum(counts) / (megatron.get("pipeline_model_parallel_size") or 1)
    changes: dict[str, Any] = {}
    if len(set(counts)) > 1:
        changes["stage_shares"] = tuple(count / mean for count in counts)
    if number is not None:
        chunks = 1 if per_rank else plans.chunks_of(megatron)
        part = min(1.0, number * chunks / mean)
        changes |= {"recompute": part, "input_share": 1 - part}
    return changes


def _computing_layers(megatron: Megatron) -> tuple[int, ...]:
    """Layers that compute, of each stage in the order in which a micro-batch passes them."""
    counts = layers_of_stages(megatron)
    noop = indices_of(megatron.get("noop_layers"))
    ends = tuple(accumulate(counts))
    return tuple(
        count - sum(end - count <= layer < end for layer in noop)
        for count, end in zip(counts, ends, strict=True)
    )


def _of_chunk(model: Any) -> Any:
    """Recomputation of a model chunk's layers; None: it has no such layers."""
    from mindspeed.memory.megatron import runtime_of
    from mindspeed.memory.scheduled import ScheduledRecomputation

    runtime = runtime_of(model)
    return None if runtime is None else ScheduledRecomputation(runtime)
