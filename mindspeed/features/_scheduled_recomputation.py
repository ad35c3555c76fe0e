"""What ``--recompute-in-bubble`` and ``--recompute-in-advance`` share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features import _pipeline_plan
from mindspeed.features._activation_memory import attach_plan, common_problems
from mindspeed.features.feature import Megatron, Problem

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.memory.plan import Plan
    from mindspeed.memory.presets import ChunkLayers

When = Literal["bubble", "advance"]

_BOTH = "both decide which layers are recomputed"
_AGAIN = "a second run would change scaling factors"
_CONFLICTS = {
    "activation_plan": ("--activation-plan", _BOTH),
    "optimize_recomp_communication_level": ("--optimize-recomp-communication-level", _BOTH),
    "adaptive_recompute_device_swap": ("--adaptive-recompute-device-swap", _BOTH),
    "adaptive_memory_optimization": ("--adaptive-memory-optimization", _BOTH),
    "moe_adaptive_recompute_activation": ("--moe-adaptive-recompute-activation", _BOTH),
    "moe_layer_recompute": ("--moe-layer-recompute", _BOTH),
    "swap_attention": (
        "--swap-attention",
        "layers that are recomputed leave nothing to swap",
    ),
    "distribute_saved_activations": (
        "--distribute-saved-activations",
        "inputs of layers stay where they are",
    ),
    "fp8": ("--fp8-format", _AGAIN),
    "fp4": ("--fp4-format", _AGAIN),
}


def problems_of(flag: str, when: When, megatron: Megatron, *, chunks: str) -> Iterator[Problem]:
    """What neither flag can run with.

    Args:
        flag: Of the feature.
        when: What it asks of the schedule.
        megatron: Megatron's arguments.
        chunks: What it needs several model chunks of a rank for.
    """
    said = set()
    for problem in (*_pipeline_plan.problems_of(flag, megatron), *common_problems(flag, megatron)):
        combination, _, _ = problem.message.partition(":")
        if combination not in said:
            yield problem
        said.add(combination)
    for name, (other, why) in _CONFLICTS.items():
        if megatron.get(name):
            yield Problem(flag, f"cannot be combined with {other}: {why}", "remove one")
    if (megatron.get("adaptive_recompute_device_size") or 0) > 0:
        other = "--adaptive-recompute-device-size"
        yield Problem(flag, f"cannot be combined with {other}: {_BOTH}", "remove one")
    if _pipeline_plan.chunks_of(megatron) == 1:
        yield Problem(
            flag,
            f"needs several model chunks on each pipeline rank: {chunks}",
            "add --num-layers-per-virtual-pipeline-stage, or remove it",
        )
    elif not said:
        from mindspeed.pipeline.schedule.schedules import ScheduleRequest

        found = _pipeline_plan.plan_of(flag, megatron, ScheduleRequest(recompute=when))
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
        seams: The feature's.
        feature: Its name.
        flag: Its flag, for messages.
        megatron: Megatron's arguments.
        when: What it asks of the schedule.
        number: How many layers of every chunk; None: all.
    """
    per_rank = number is not None and bool(megatron.get("enable_recompute_layers_per_pp_rank"))

    def plan(sites: dict[str, dict[str, Any]], layers: ChunkLayers) -> Plan:
        from mindspeed.memory.plan import LAYER, Action
        from mindspeed.memory.presets import plan_of

        chosen = layers.first(number, of_rank=per_rank)
        return plan_of(chosen, lambda layer: (LAYER,), Action.RECOMPUTE)

    def schedule(previous: Any) -> Any:
        from mindspeed.pipeline.schedule.megatron import scheduled

        return replace(scheduled(previous, recompute=when), recomputation=_of_chunk)

    attach_plan(seams, feature, flag, megatron, plan)
    seams.schedule.add(schedule, owner=feature)


def _of_chunk(model: Any) -> Any:
    """What drops and recomputes the layers of a model chunk; None: it has no such layers."""
    from mindspeed.memory.megatron import runtime_of
    from mindspeed.memory.scheduled import ScheduledRecomputation

    runtime = runtime_of(model)
    return None if runtime is None else ScheduledRecomputation(runtime)
