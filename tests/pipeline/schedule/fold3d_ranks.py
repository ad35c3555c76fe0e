"""When the reductions of gradients start in a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.pipeline.schedule.step_ranks import Layout, Model, differences


def run(layout: Layout, m: int, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each request what differs from Megatron's step, and when each chunk was reduced.

    Returns:
        ``differences`` from Megatron's schedule with groups of m; ``left``: for each chunk the
        number of actions of other chunks that this rank ran after the reduction had started.
    """
    from mindspeed.pipeline.schedule.costs import Costs
    from mindspeed.pipeline.schedule.megatron import scheduled
    from mindspeed.pipeline.schedule.virtual_time import VirtualTime

    model = Model(layout)
    model.config.microbatch_group_size_per_vp_stage = m
    expected = model.step(m)
    found = []
    for request in requests:
        clocks: list[VirtualTime] = []

        def clock(plan: Any, work: Any, clocks: list[VirtualTime] = clocks) -> VirtualTime:
            clocks.append(VirtualTime(plan, Costs()))
            return clocks[-1]

        started: dict[int, int] = {}
        for number, chunk in enumerate(model.chunks):
            for group in chunk.bucket_groups:
                watch(group, number, started, clocks)
        schedule = replace(scheduled(None, **request), instrument=clock)
        step = model.step(m, schedule)
        for chunk in model.chunks:
            for group in chunk.bucket_groups:
                del group.start_grad_sync
        trace = [action for action in clocks[0].trace if action.op != "G"]
        reductions = [action for action in clocks[0].trace if action.op == "G"]
        found.append(
            {
                "differences": differences(step, expected),
                "left": [len(trace) - started[number] for number in range(len(model.chunks))],
                "reductions": len(reductions),
            }
        )
    return found


def watch(group: Any, chunk: int, started: dict[int, int], clocks: list[Any]) -> None:
    """Note after how many actions the communication of a bucket has started."""
    start = type(group).start_grad_sync.__get__(group)

    def start_grad_sync(*args: Any, **options: Any) -> Any:
        result = start(*args, **options)
        assert group.grad_reduce_handle is not None
        done = sum(action.op != "G" for action in clocks[0].trace)
        started.setdefault(chunk, done)
        return result

    group.start_grad_sync = start_grad_sync


def gathers(layout: Layout, m: int, kinds: list[str]) -> list[list[int]]:
    """For each kind of schedule, how many forwards had run when each chunk's gather started."""
    from mindspeed.pipeline.schedule.costs import Costs
    from mindspeed.pipeline.schedule.megatron import scheduled
    from mindspeed.pipeline.schedule.virtual_time import VirtualTime

    model, found = Model(layout), []
    for kind in kinds:
        clocks: list[VirtualTime] = []
        started: dict[int, int] = {}

        def clock(plan: Any, work: Any, clocks: list[VirtualTime] = clocks) -> VirtualTime:
            clocks.append(VirtualTime(plan, Costs()))
            return clocks[-1]

        def watched(number: int, clocks: Any = clocks, started: Any = started) -> Any:
            start = model.chunks[number].start_param_sync

            def start_param_sync(*args: Any, **options: Any) -> Any:
                started[number] = sum(action.op == "F" for action in clocks[0].trace)
                return start(*args, **options)

            return start_param_sync

        model.config.param_sync_func = [watched(number) for number in range(len(model.chunks))]
        model.step(m, replace(scheduled(None, kind=kind), instrument=clock))
        found.append([started[number] for number in range(len(model.chunks))])
    return found
