"""Bytes alive on a real rank, found by a walk of live objects and of what autograd has saved.

It shares no code with the planner: no dispatch mode, no weak references, no hooks of modules.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import torch


def alive() -> int:
    """Bytes of all untyped storages that live objects and graphs reach."""
    storages: dict[int, int] = {}
    state = torch.get_rng_state().nbytes  # those of generators are the host's
    nodes: list[Any] = []
    seen: set[int] = set()
    keep: list[Any] = []  # nodes are made when asked for; ids must not be taken again

    def see(tensor: Any) -> None:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        nodes.append(tensor.grad_fn)

    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            see(one)
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        keep.append(node)
        nodes += [next_node for next_node, _ in node.next_functions]
        for tensor in _saved(node):
            keep.append(tensor)
            see(tensor)
    return sum(size for size in storages.values() if size != state)


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Tensors that a node of a graph has saved."""
    for name in dir(node):
        if name.startswith("_saved_") or name in ("saved_tensors", "variable"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # released by backward
                continue
            for one in value if isinstance(value, list | tuple) else [value]:
                number = isinstance(one, torch.Tensor) and not one.dim() and one.element_size() == 8
                if isinstance(one, torch.Tensor) and not number:  # of Python
                    yield one


def levels(flags: str) -> list[int]:
    """Bytes alive after each action of the second step of this rank."""
    from megatron.core.pipeline_parallel import schedules

    from mindspeed.instruments.live_memory import LiveMemory
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.training import setup
    from tests.planner.real_and_fake import _args

    args = _args(flags, int(os.environ["WORLD_SIZE"]))
    args.check_for_nan_in_loss_and_grad = False
    setup.initialize(args)
    gc.disable()
    gc.collect()
    before, found = alive(), list[int]()  # states of generators of random numbers
    step = StepOfRank(args, LiveMemory())
    step.run()
    gc.collect()
    inner = schedules.forward_step, schedules.backward_step

    def watched(function: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            found.append(alive() - before)
            return result

        return run

    schedules.forward_step, schedules.backward_step = map(watched, inner)
    try:
        step.run()
    finally:
        schedules.forward_step, schedules.backward_step = inner
        gc.enable()
    return found


def planned(flags: str, world: int, stages: list[int]) -> list[list[int]]:
    """The same of pipeline ranks, spliced from small ones."""
    from mindspeed.planner import isolated
    from mindspeed.planner.compose.job import trace_job
    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import layout_of
    from mindspeed.planner.shape import shape_of
    from tests.planner.real_and_fake import SMALL
    from tests.support.trainer_job import command

    words = command([*SMALL.split(), *flags.split()])
    job = Job(words)

    def shape() -> Any:
        args = job.settings({}, world).args
        return layout_of(args), shape_of(args)

    layout, found = isolated.call(shape)
    traces = trace_job(job, layout, found, ranks=stages)
    return [[one.static.total() + level for level in one.step.after] for one in traces]
