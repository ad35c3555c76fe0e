"""The schedules by name: what a request asks for, and the plan that fulfils it.

request = ScheduleRequest(kind="interleaved")
plan = build_plan(request, ranks=4, chunks=2, num_microbatches=16)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule import orders
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan


@dataclass(frozen=True)
class ScheduleRequest:
    """What the flags of a job ask of its pipeline schedule.

    Attributes:
        kind: one of :data:`KINDS`. ``1f1b`` with several chunks per rank is its interleaved form.
        plan: a plan read from a file; it is taken instead of one of ``kind``.
        memory_limit: most activations alive on a rank, in A: one micro-batch over all stages of
            the rank.
        sizes: samples of each micro-batch, where they differ.
        swap: pending weight gradients keep their inputs on the host (nanopipe).
        recompute: ``bubble`` or ``advance``: when activations that are not stored come back.
        costs: by which actions are placed.
        group_size: g of :func:`orders.flush`.
        warmup: k of :func:`orders.flush`.
        split_cooldown: dualpipev splits the backwards of its cool-down.
        strict: aiao in the literal order: all forwards of a chunk, then those of the next.
        v_shape: the model is split in a V; the kinds zb-v and dualpipev always are.
    """

    kind: str = "1f1b"
    plan: Plan | None = None
    memory_limit: float | None = None
    sizes: tuple[float, ...] | None = None
    swap: bool = False
    recompute: str | None = None
    costs: Costs = field(default_factory=Costs)
    group_size: int | None = None
    warmup: float | None = None
    split_cooldown: bool = False
    strict: bool = False
    v_shape: bool = False

    def placement(self, ranks: int, chunks: int) -> Placement:
        """Which rank has which stages."""
        if self.plan is not None:
            return self.plan.placement
        if self.v_shape or self.kind in ("zb-v", "dualpipev"):
            return Placement.v_shape(ranks)
        return Placement.loop(ranks, chunks)


KINDS = ("auto", "1f1b", "interleaved", "nanopipe", "zb-h1", "zb-v", "dualpipev", "aiao")


def build_plan(
    request: ScheduleRequest,
    ranks: int,
    chunks: int,
    num_microbatches: int,
    forward_only: bool = False,
) -> Plan:
    """The plan of one step.

    Args:
        request: what is asked for.
        ranks: p.
        chunks: v, model chunks of each rank.
        num_microbatches: m of this step.
        forward_only: an evaluation; the kind then only decides on the placement.

    Raises:
        ConfigError: the schedule does not exist for these sizes; names what would do.
    """
    placement = request.placement(ranks, chunks)
    if forward_only:
        rows = orders.forward_only(placement, num_microbatches)
        return Plan(placement, rows, num_microbatches, name="forward only")
    if request.plan is not None:
        return request.plan
    if request.kind not in ("1f1b", "interleaved"):
        raise ConfigError(f"--pipeline-schedule {request.kind} is none of {', '.join(KINDS)}")
    if chunks > 1 and num_microbatches < ranks:
        raise ConfigError(
            f"{num_microbatches} micro-batches are too few for the interleaved schedule of "
            f"{ranks} pipeline ranks; it needs at least {ranks}"
        )
    rows = orders.flush(ranks, chunks, num_microbatches, request.group_size, request.warmup)
    name = "1f1b" if chunks == 1 else "interleaved"
    return Plan(placement, rows, num_microbatches, request.sizes, name)
