"""Pairs: a forward of one micro-batch and a backward of another that run at the same time.

One computes while the other communicates, so that the all-to-all of experts (or another collective
of a layer) is hidden. A pair is one node of the schedule: it starts when the inputs of both are
there, and hands on both outputs at its end. A :class:`Plan` names the forwards of its pairs; the
backward is the next action of the row.

Two streams of a pair, layer k of the forward and l of the backward (eF, eI, eW: experts):

    computation     attention F_k | eI_l  eW_l | eF_k         | attention I_l  W_l
    communication   combine'_l    | dispatch_k | dispatch'_l  | combine_k

With x = one all-to-all over the forward of a layer, a layer of a pair exposes max(0, 4x - 3) of
its forward with the weight gradients in place, max(0, 4x - 2) without (F = I = W).

Where the experts of the backward get their rows a second time (zero memory, level0), that dispatch
begins with eI and ends before eW: a layer exposes max(0, 3x - 3/2, 5x - 3).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from mindspeed.pipeline.schedule.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Action
from mindspeed.pipeline.schedule.orders import Rows
from mindspeed.pipeline.schedule.plan import Plan


def paired(plan: Plan) -> Plan:
    """``plan`` with each forward that a whole backward of another micro-batch follows in a pair.

    On a V the two are of different stages: its steady state alternates between both.
    """
    found: set[Action] = set()
    for row in plan.rows:
        taken = None
        for first, second in pairwise(row):
            if first is not taken and _fits(first, second, not plan.placement.loops):
                found.add(first)
                taken = second
    return replace(plan, paired=frozenset(found))


def backwards_beside_the_next_forward(rows: Rows) -> Rows:
    """Each backward changes places with the forward after it, so that the two can be a pair.

    The steady state of a V (F0 B0 F1 B1) has twice the time of a pair where each forward is paired
    with the backward after it: the next rank's pair would wait for this one's.
    """
    swapped = []
    for row in rows:
        line = list(row)
        for place, (first, second) in enumerate(pairwise(row)):
            if _fits(second, first, stages_differ=True) and line[place] is first:
                line[place : place + 2] = second, first
        swapped.append(tuple(line))
    return tuple(swapped)


def _fits(first: Action, second: Action, stages_differ: bool) -> bool:
    return (
        (first.op, second.op) == (FORWARD, BACKWARD)
        and first.microbatch != second.microbatch
        and not (stages_differ and first.stage == second.stage)
    )


def problem_of(forward: Action, backward: Action | None) -> str | None:
    """Why two actions cannot be a pair."""
    if forward.op != FORWARD or backward is None or backward.op not in (BACKWARD, BACKWARD_INPUT):
        return "a pair is a forward F and a backward B or I of the same rank"
    if forward.microbatch == backward.microbatch:
        return "the members depend on each other: they are of the same micro-batch"
    return None


@lru_cache(maxsize=256)
def pair_seconds(
    forward: float,
    input_gradient: float,
    weight_gradient: float,
    exchange: float,
    layers: int,
    rows_again: bool = False,
) -> float:
    """Duration of a pair of stages with equally many layers.

    Args:
        forward: of the stage, without collectives.
        input_gradient: the same.
        weight_gradient: the same; 0 if it runs elsewhere.
        exchange: one of the four all-to-alls, over all layers of the stage.
        layers: of the stage; attention and experts take half of each.
        rows_again: the rows of the backward's experts are dispatched a second time.
    """
    computation = communication = 0.0
    f, i, w = (time / layers / 2 for time in (forward, input_gradient, weight_gradient))
    x = exchange / layers
    attention_gradient = combined = 0.0  # when these are there
    for _ in range(layers):
        attention = max(computation, combined) + f
        combined_back = max(communication, attention_gradient) + x
        experts = max(attention, combined_back)
        experts_gradient = experts + i
        again = max(combined_back, experts) + x if rows_again else combined_back
        dispatched = max(again, attention) + x
        weights = max(experts_gradient, again) + w
        computation = max(weights, dispatched) + f  # experts of the forward
        dispatched_back = max(dispatched, experts_gradient) + x
        communication = combined = max(dispatched_back, computation) + x
        attention_gradient = max(computation, dispatched_back) + i
        computation = attention_gradient + w
    return max(computation, communication)
