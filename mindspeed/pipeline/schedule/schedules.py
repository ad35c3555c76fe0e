"""The schedules by name: what a request asks for, and the plan that fulfils it.

    request = ScheduleRequest(kind="interleaved")
    plan = build_plan(request, ranks=4, chunks=2, num_microbatches=16)

| kind        | order                    | split backwards | memory of the worst rank, in A    |
|---          |---                       |---              |---                                |
| 1f1b        | flush, k=1               | no              | p                                 |
| interleaved | flush, k=2               | no              | p + (p - 1) / v                   |
| zb-h1       | flush, k=1               | where it helps  | p                                 |
| nanopipe    | flush, k=2 (v=1: k=1)    | where it helps  | p + (p - 1) / v                   |
| zb-v        | vee                      | where it helps  | p                                 |
| dualpipev   | DeepSeek's               | some            | p + 1/2                           |
| v-half      | building block           | where it helps  | (p + 2) / 2, rounded down         |
| v-min       | building block           | where it helps  | (p + 4) / 3, rounded down         |
| wave        | waves of 2, 4, ... chunks| no              | p                                 |
| zb-wave     | the same                 | where it helps  | p                                 |
| aiao        | flush, g=m (or breadth)  | no              | (2 (p - 1) + (v - 1) m + 1) / v   |
| auto        | the fastest of auto.py's | where it helps  | the limit, if there is one        |
| v-auto      | the same on a V          | where it helps  | the limit, else at most p + 1/2   |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mindspeed.errors import ConfigError
from mindspeed.pipeline.placed_stages import V_SHAPES, WAVES
from mindspeed.pipeline.schedule import orders, recompute
from mindspeed.pipeline.schedule.auto import fastest
from mindspeed.pipeline.schedule.blocks import Block, published_memory, v_half, v_min
from mindspeed.pipeline.schedule.checker import check
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.fill import split_backwards, with_reductions
from mindspeed.pipeline.schedule.join import joined
from mindspeed.pipeline.schedule.pairs import backwards_beside_the_next_forward, paired
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.swap import swap
from mindspeed.pipeline.schedule.waves import least as least_of_waves
from mindspeed.pipeline.schedule.waves import wave
from mindspeed.pipeline.schedule.weave import WeavingJob, least_memory, woven


@dataclass(frozen=True)
class ScheduleRequest:
    """Pipeline schedule that the flags of a job request.

    Attributes:
        kind: one of :data:`KINDS`. ``1f1b`` with several chunks per rank is its interleaved form,
            ``zb-h1`` and ``nanopipe`` exist for both.
        plan: a plan read from a file; it is taken instead of one of ``kind``.
        order: rows of actions for a placement and a number of micro-batches, taken instead of those
            of ``kind``: the schedule of an extension. Reductions are added.
        memory_limit: most activations alive on a rank, in A: one micro-batch over all stages of
            the rank.
        sizes: samples of each micro-batch, where they differ.
        swap: pending weight gradients keep their inputs on the host (nanopipe).
        recompute: ``bubble`` or ``advance``: when activations that are not stored come back.
        costs: by which actions are placed.
        group_size: g of :func:`orders.flush`.
        warmup: k of :func:`orders.flush`.
        split_cooldown: dualpipev splits the backwards of its cool-down, and not only those of its
            warm-up.
        strict: aiao in the literal order: all forwards of a chunk, then those of the next.
        v_shape: the model is split in a V; the kinds of :data:`V_SHAPES` always are.
        split: auto may split backwards.
        pairs: forwards and backwards run at the same time (:mod:`.pairs`).
    """

    kind: str = "1f1b"
    plan: Plan | None = None
    order: Callable[[Placement, int], orders.Rows] | None = None
    memory_limit: float | None = None
    sizes: tuple[int, ...] | None = None
    swap: bool = False
    recompute: str | None = None
    costs: Costs = field(default_factory=Costs)
    group_size: int | None = None
    warmup: float | None = None
    split_cooldown: bool = True
    strict: bool = False
    v_shape: bool = False
    split: bool = True
    pairs: bool = False

    def placement(self, ranks: int, chunks: int) -> Placement:
        if self.plan is not None:
            return self.plan.placement
        if self.v_shape or self.kind in V_SHAPES:
            return Placement.v_shape(ranks)
        if self.kind in WAVES:
            return Placement.snake(ranks, chunks)
        return Placement.loop(ranks, chunks)


def build_plan(
    request: ScheduleRequest,
    ranks: int,
    chunks: int,
    num_microbatches: int,
    forward_only: bool = False,
    checked: bool = True,
) -> Plan:
    """The plan of one step.

    Args:
        request: what is asked for.
        ranks: p.
        chunks: v, model chunks of each rank.
        num_microbatches: m of this step.
        forward_only: an evaluation; the kind then only decides on the placement.
        checked: prove that it ends and fits into memory, which takes longest.

    Raises:
        ConfigError: the schedule does not exist for these sizes; names what would do.
    """
    placement = request.placement(ranks, chunks)
    if request.pairs and not forward_only:
        _check_pairs(request)
    _check_sizes(request, placement, ranks, chunks, num_microbatches, forward_only)
    if forward_only:
        rows = orders.forward_only(placement, num_microbatches)
        plan = Plan(placement, rows, num_microbatches, name="forward only")
        check(plan, forward_only=True)
        return plan
    if request.plan is not None:
        plan = replace(request.plan, sizes=relative_sizes(request.sizes))
    elif request.order is not None:
        rows = request.order(placement, num_microbatches)
        plan = Plan(
            placement, rows, num_microbatches, relative_sizes(request.sizes), _name(request)
        )
        plan = _recomputing(request, with_reductions(plan))
    elif request.kind in _BUILDERS:
        plan = _BUILDERS[request.kind](request, placement, num_microbatches)
        plan = _recomputing(request, plan)
    else:
        raise ConfigError(
            f"--pipeline-schedule {request.kind} is none of {', '.join(KINDS)} and no file"
        )
    if checked:
        check(plan, request.memory_limit, request.costs)
    return plan


def _name(request: ScheduleRequest) -> str:
    return getattr(request.order, "__name__", request.kind)


def _check_pairs(request: ScheduleRequest) -> None:
    if request.plan is not None or request.order is not None:
        return  # a table says itself which actions are pairs
    if request.kind not in PAIRED:
        why = _NO_PAIRS.get(request.kind, "has no pairs of a forward and a backward")
        raise ConfigError(f"{why}; one of {', '.join(PAIRED)} has pairs")
    if request.recompute or request.sizes is not None or request.swap:
        raise ConfigError(
            f"pairs of --pipeline-schedule {request.kind} cannot be combined with micro-batches "
            "of different sizes, recomputation in the schedule, or weight gradients that wait on "
            "the host"
        )


def _check_sizes(
    request: ScheduleRequest, placement: Placement, p: int, v: int, m: int, forward_only: bool
) -> None:
    if request.plan is not None:
        name = f"the pipeline schedule {request.plan.name}"
        if placement.ranks != p:
            raise ConfigError(f"{name} is for {placement.ranks} pipeline ranks, the job has {p}")
        for rank, stages in enumerate(placement.stages):
            if len(stages) != v:
                raise ConfigError(
                    f"{name} has {len(stages)} stages on rank {rank}, the job {v} model chunks"
                )
        if request.plan.num_microbatches != m and not forward_only:
            raise ConfigError(
                f"{name} is for {request.plan.num_microbatches} micro-batches, the step has {m}"
            )
    if request.sizes is not None and len(request.sizes) != m and not forward_only:
        raise ConfigError(f"{len(request.sizes)} sizes of micro-batches for {m} micro-batches")


def _one_forward_one_backward(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    return with_reductions(_flush(request, placement, m))


def _interleaved(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    _need_chunks(placement, "interleaved")
    return with_reductions(_flush(request, placement, m))


def _nanopipe(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    order = _flush(request, placement, m)
    if not request.swap:
        return _filled(request, order)
    peaks = _peaks(request, order)
    filled = split_backwards(order, request.costs, [max(peaks)] * placement.ranks)
    return with_reductions(swap(filled, request.costs, peaks))


def _zero_bubble(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    return _filled(request, _flush(request, placement, m, warmup=1.0))


def _zero_bubble_v(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    rows = orders.vee(placement.ranks, m)
    if request.pairs:
        rows = backwards_beside_the_next_forward(rows)
    return _filled(request, _plan(request, placement, m, rows))


def _dualpipev(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    p = placement.ranks
    if m < 2 * p:
        raise ConfigError(
            f"{m} micro-batches are too few for DualPipeV on {p} pipeline ranks; it needs at "
            f"least {2 * p}. --pipeline-schedule zb-v takes any number"
        )
    rows = orders.dualpipev(p, m, split_cooldown=request.split_cooldown)
    return with_reductions(_plan(request, placement, m, rows))


def _building_block(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    walk = {"v-half": v_half, "v-min": v_min}[request.kind](placement.ranks)
    block = Block(placement, walk)
    job = WeavingJob(m, request.costs, relative_sizes(request.sizes))
    needed = least_memory(block, job)
    if request.memory_limit is not None and needed > request.memory_limit + 1e-6:
        raise ConfigError(
            f"the pipeline schedule {request.kind} needs {needed:g} A of activations; "
            f"{request.memory_limit:g} A are allowed (--pipeline-memory-limit). v-auto takes what "
            "fits"
        )
    limit = request.memory_limit
    cap = max(needed, published_memory(request.kind, placement.ranks)) if limit is None else limit
    found = woven(block, job, cap, request.kind).plan
    return with_reductions(joined(found, request.costs))


def _wave(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    _need_chunks(placement, request.kind)
    sizes, whole = relative_sizes(request.sizes), request.kind == "wave"
    job = WeavingJob(m, request.costs, sizes, whole)
    limit = placement.ranks if request.memory_limit is None else request.memory_limit
    found = wave(placement, job, limit, request.kind)
    if found is None:
        raise ConfigError(
            f"the pipeline schedule {request.kind} needs {least_of_waves(placement, job):g} A of "
            f"activations; {limit:g} A are allowed (--pipeline-memory-limit)"
        )
    return with_reductions(found.plan if whole else joined(found.plan, request.costs))


def _all_in_all_out(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    _need_chunks(placement, "aiao")
    p, v = placement.ranks, placement.chunks
    if request.strict:
        return with_reductions(_plan(request, placement, m, orders.breadth(p, v, m)))
    return with_reductions(_flush(replace(request, group_size=m), placement, m))


def _auto(request: ScheduleRequest, placement: Placement, m: int) -> Plan:
    _need_microbatches(placement, m)
    return fastest(
        placement,
        m,
        request.costs,
        memory_limit=request.memory_limit,
        sizes=relative_sizes(request.sizes),
        split=request.split,
    )


PAIRED = ("1f1b", "interleaved", "nanopipe", "zb-v", "dualpipev")
_NO_PAIRS = dict.fromkeys(
    ("v-half", "v-min"),
    "has no pairs: each backward is needed by the forward that would run beside it, so that ranks "
    "would wait for each other",
)
_BUILDERS: dict[str, Callable[[ScheduleRequest, Placement, int], Plan]] = {
    "auto": _auto,
    "v-auto": _auto,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "nanopipe": _nanopipe,
    "zb-h1": _zero_bubble,
    "zb-v": _zero_bubble_v,
    "dualpipev": _dualpipev,
    "v-half": _building_block,
    "v-min": _building_block,
    "wave": _wave,
    "zb-wave": _wave,
    "aiao": _all_in_all_out,
}
KINDS = tuple(_BUILDERS)


def memory_limit(factor: float, ranks: int, chunks: int) -> float:
    """A memory limit in A, the activations of one micro-batch over all stages of a rank.

    Args:
        factor: of what Megatron's own schedule keeps on its fullest rank: 1F1B the activations of
            p micro-batches, interleaved schedules those of p + (p - 1) / v.
        ranks: p.
        chunks: v.
    """
    return factor * (ranks if chunks == 1 else ranks + (ranks - 1) / chunks)


def _need_chunks(placement: Placement, kind: str) -> None:
    if placement.chunks == 1:
        raise ConfigError(
            f"--pipeline-schedule {kind} needs several model chunks on each rank "
            "(--num-layers-per-virtual-pipeline-stage); without them take 1f1b"
        )


def _need_microbatches(placement: Placement, m: int) -> None:
    p, v = placement.ranks, placement.chunks
    if v > 1 and m < p and placement.loops:
        raise ConfigError(
            f"{m} micro-batches are too few for {p} pipeline ranks with {v} model chunks each; "
            f"at least {p} are needed"
        )


def _flush(
    request: ScheduleRequest, placement: Placement, m: int, warmup: float | None = None
) -> Plan:
    _need_microbatches(placement, m)
    p, v = placement.ranks, placement.chunks
    k = request.warmup if request.warmup is not None else warmup
    if request.pairs:  # less warm-up would let a pair wait for itself, or for the one before
        k = 2.0
    sizes = p, v, m, request.group_size, k, int(request.pairs)
    plan = _plan(request, placement, m, orders.flush(*sizes))
    if not request.pairs:
        return plan
    beside = [warmup < v * m for warmup in orders.warmups(*sizes)]
    # Where all forwards come first, none runs beside a backward.
    rest = {one for one in plan.paired if beside[placement.rank(one.stage)]}
    return replace(plan, paired=frozenset(rest))


def _plan(request: ScheduleRequest, placement: Placement, m: int, rows: orders.Rows) -> Plan:
    plan = Plan(placement, rows, m, relative_sizes(request.sizes), request.kind)
    return paired(plan) if request.pairs else plan


def relative_sizes(sizes: tuple[int, ...] | None) -> tuple[float, ...] | None:
    """Sizes with mean 1, so that A remains one micro-batch of ``--micro-batch-size``."""
    return None if sizes is None else tuple(size * len(sizes) / sum(sizes) for size in sizes)


def _filled(request: ScheduleRequest, plan: Plan) -> Plan:
    """The backwards split, within the limit or the memory that the order needs anyway."""
    needed = max(_peaks(request, plan))
    limit = needed if request.memory_limit is None else request.memory_limit
    filled = split_backwards(plan, request.costs, [limit] * plan.placement.ranks)
    return with_reductions(joined(filled, request.costs))


def _peaks(request: ScheduleRequest, plan: Plan) -> tuple[float, ...]:
    """Least memory of each rank: that of an order of whole forwards and backwards."""
    peaks = simulate(plan, request.costs).peak_memory
    if request.memory_limit is not None and max(peaks) > request.memory_limit + 1e-6:
        raise ConfigError(
            f"the pipeline schedule {plan.name} needs {max(peaks):g} A of activations at the "
            f"peak of rank {peaks.index(max(peaks))}; {request.memory_limit:g} A are allowed "
            "(--pipeline-memory-limit)"
        )
    return peaks


def _recomputing(request: ScheduleRequest, plan: Plan) -> Plan:
    if request.recompute == "bubble":
        return recompute.in_bubble(plan, request.costs, request.memory_limit)
    if request.recompute == "advance":
        return recompute.in_advance(plan, request.costs)
    return plan
