"""Prove that a plan is correct: it computes every pair of its mask exactly once, with rows that the
rank holds at that moment, and every gradient reaches the owner of its row.

The tests run it for every planner; with ``MINDSPEED_CHECK_PLAN=1`` it runs before the first use of
a plan (:mod:`~mindspeed.attention.context_parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.attention.mask import Region
from mindspeed.attention.plan import OWN, Plan, Stage, Transfer, saved_buffer
from mindspeed.attention.sequence_sharding import Range, Ranges, length, union, without
from mindspeed.errors import ConfigError


class WrongPlanError(ConfigError):
    """A plan is wrong; it was not executed."""


def check(plan: Plan) -> None:
    """Prove a plan.

    Raises:
        WrongPlanError: A token has no owner or two, a pair of the mask is missing or computed
            twice, a rank works with rows or sends rows that it does not have, or a gradient does
            not reach the owner of its row.
    """
    _owners(plan)
    for name, stages in (("forward", plan.forward), ("backward", plan.backward)):
        _pairs(plan, name, stages)
        _rows(plan, name, stages)
    _gradients(plan)


def check_area(plan: Plan) -> None:
    """Compare only the number of pairs with that of the mask.

    Raises:
        WrongPlanError: The numbers differ.
    """
    wanted = plan.mask.area()
    for name, stages in (("forward", plan.forward), ("backward", plan.backward)):
        computed = sum(region.area() for stage in stages for own in stage.work for region in own)
        if computed != wanted:
            raise WrongPlanError(
                f"{plan.algorithm}: {name} computes {computed} pairs, the mask has {wanted}"
            )


def _owners(plan: Plan) -> None:
    segments = sorted(part for own in plan.sharding.segments for part in own)
    at = 0
    for a, b in segments:
        if a != at or b <= a:
            raise WrongPlanError(f"{plan.algorithm}: position {min(a, at)} has no owner or two")
        at = b
    if at != plan.mask.size:
        raise WrongPlanError(
            f"{plan.algorithm}: owners of {at} positions, the mask has {plan.mask.size}"
        )


def _pairs(plan: Plan, name: str, stages: Sequence[Stage]) -> None:
    work = sorted(region for stage in stages for own in stage.work for region in own)
    inside = sum(
        common.area()
        for region in work
        for wanted in plan.mask.regions_of(region.q0, region.q1)
        if (common := _common(region, wanted))
    )
    computed, wanted_area = sum(region.area() for region in work), plan.mask.area()
    if computed != wanted_area or inside != computed:
        raise WrongPlanError(
            f"{plan.algorithm}: {name} computes {computed} pairs, {inside} of them of the mask's "
            f"{wanted_area}"
        )
    open_regions: list[Region] = []
    for region in work:
        open_regions = [other for other in open_regions if other.q1 > region.q0]
        for other in open_regions:
            if _common(region, other):
                raise WrongPlanError(
                    f"{plan.algorithm}: {name} computes a pair twice: {other}, {region}"
                )
        open_regions.append(region)


def _common(one: Region, other: Region) -> Region | None:
    both = one._replace(lo=max(one.lo, other.lo), hi=min(one.hi, other.hi))
    return both.crop(*other[:4])


def _rows(plan: Plan, name: str, stages: Sequence[Stage]) -> None:
    own = plan.sharding.segments
    for number, stage in enumerate(stages):
        sends = stage.kv or stage.q
        if sends and not 0 <= stage.posted < number:
            raise WrongPlanError(f"{plan.algorithm}: {name} {number} is posted at {stage.posted}")
        for transfer in stage.kv:
            there = _buffer(plan, name, stages, transfer, stage.posted)
            if lacking := without(transfer.ranges, there):
                raise WrongPlanError(
                    f"{plan.algorithm}: {name} {number}: {transfer} lacks {lacking}"
                )
        for transfer in stage.q:
            if lacking := without(transfer.ranges, own[transfer.src]):
                raise WrongPlanError(
                    f"{plan.algorithm}: {name} {number}: {transfer} lacks {lacking}"
                )
        for rank, regions in enumerate(stage.work):
            queries = [own[rank], _ranges(stage.q_to(rank))]
            keys = [own[rank], *_keys(plan, name, stage, rank)]
            for region in regions:
                if _lacking((region.q0, region.q1), queries):
                    raise WrongPlanError(f"{plan.algorithm}: rank {rank} does not own {region}")
                if _lacking((region.k0, region.k1), keys):
                    raise WrongPlanError(
                        f"{plan.algorithm}: {name} {number}: rank {rank} has no keys for {region}"
                    )


def _keys(plan: Plan, name: str, stage: Stage, rank: int) -> list[Ranges]:
    """Buffers of received and of saved keys of a rank; a region takes its keys from one."""
    arrived = _ranges(stage.kv_to(rank))
    kept_keys = [_ranges(plan.forward[t].kv_to(rank)) for t in plan.saved_k]
    if stage.values_only and arrived and arrived not in kept_keys:
        raise WrongPlanError(f"{plan.algorithm}: rank {rank} has not kept the keys of {arrived}")
    kept_rows = plan.saved_kv if name == "backward" else ()
    return [arrived, *(_ranges(plan.forward[t].kv_to(rank)) for t in kept_rows)]


def _lacking(wanted: Range, buffers: Sequence[Ranges]) -> bool:
    return all(without([wanted], there) for there in buffers)


def _buffer(
    plan: Plan, name: str, stages: Sequence[Stage], transfer: Transfer, posted: int
) -> Ranges:
    if transfer.buffer == OWN:
        return plan.sharding.segments[transfer.src]
    for stage in plan.saved_kv if name == "backward" else ():
        if transfer.buffer == saved_buffer(stage):
            return _ranges(plan.forward[stage].kv_to(transfer.src))
    if 0 <= transfer.buffer <= posted:
        return _ranges(stages[transfer.buffer].kv_to(transfer.src))
    return ()


def _ranges(transfers: Sequence[Transfer]) -> Ranges:
    return tuple(part for transfer in transfers for part in transfer.ranges)


def _gradients(plan: Plan) -> None:
    """Follow the gradient of every key from the ranks that compute it to its owner."""
    held: list[list[Range]] = [[] for _ in range(plan.ranks)]
    for number, stage in enumerate(plan.backward):
        for rank, regions in enumerate(stage.work):
            keys = ((region.k0, region.k1) for region in regions)
            held[rank] += without(keys, plan.sharding.segments[rank])
        arriving: list[list[Range]] = [[] for _ in range(plan.ranks)]
        for transfer in stage.dkv:
            # Rows without a gradient are sent as zeros.
            held[transfer.src] = list(without(held[transfer.src], transfer.ranges))
            arriving[transfer.dst] += without(transfer.ranges, plan.sharding.segments[transfer.dst])
        for rank, ranges in enumerate(arriving):
            held[rank] += ranges
        stale = [
            rank for rank, ranges in enumerate(held) if ranges and number + 1 == len(plan.backward)
        ]
        if stale:
            rows = length(union(held[stale[0]]))
            raise WrongPlanError(
                f"{plan.algorithm}: gradients of {rows} keys do not leave rank {stale[0]}"
            )
