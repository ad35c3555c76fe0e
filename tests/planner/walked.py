"""Bytes alive on a real rank, found by a walk of live objects and of what autograd has saved.

It shares no code with the planner: no weak references, no hooks of storages, and a dispatch mode
only for what is left out.

    levels = readings(step, read)       # the same places on real ranks and on FakeTensors
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TRIES = 10
"""Walks until a thread of gloo, which holds tensors for some time after the wait, has ended."""


class Reading(NamedTuple):
    """Bytes alive at a place of a step.

    Attributes:
        place: its name.
        alive: bytes, those of the host included.
        host: bytes of host memory, where they are known.
    """

    place: str
    alive: int
    host: int = 0


class Walk:
    """Bytes of all untyped storages that live objects and graphs reach, but for those of before.

    Objects of before are frozen: the collector does not list them any more.
    """

    def __init__(self) -> None:
        gc.disable()
        gc.collect()
        self._state = torch.get_rng_state().nbytes  # those of generators are the host's
        self._before = _storages(gc.get_objects())  # alive, so that nothing else has their keys
        self._tables = Tables()
        self._tables.watch()
        self._tries = TRIES
        gc.freeze()

    def alive(self) -> int:
        """Bytes alive now."""
        found = _storages(gc.get_objects())
        known = self._before.keys() | self._tables.storages.keys()
        sizes = [one.nbytes() for key, one in found.items() if key not in known]
        return sum(size for size in sizes if size != self._state)

    def settled(self, expected: int | None) -> int:
        """Bytes alive once they are as expected; else those of the last of several walks."""
        for number in range(self._tries):
            if (found := self.alive()) == expected or expected is None:
                return found
            time.sleep(0.001 * 2**number)
        self._tries = 2  # no thread has been so slow: what differs is no matter of time
        return found


def _storages(objects: Sequence[Any]) -> dict[int, torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    numbers: set[int] = set()
    nodes: list[Any] = []
    seen: set[int] = set()
    keep: list[Any] = []  # nodes are made when asked for; ids must not be taken again

    def see(tensor: Any) -> None:
        nodes.append(tensor.grad_fn)
        if tensor.is_leaf and tensor.grad is not None and tensor.grad is not tensor:
            see(tensor.grad)
        if tensor.device.type == "meta" or hasattr(type(tensor), "__tensor_flatten__"):
            return  # has no memory, or that of tensors in it
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage

    for one in objects:
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
            if not tensor.dim() and tensor.element_size() == 8:  # a number of Python
                numbers.add(tensor.untyped_storage()._cdata)
            else:
                see(tensor)
    return {key: one for key, one in storages.items() if key not in numbers}


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Tensors that a node of a graph has saved.

    What a hook has packed is not unpacked, which would make tensors; the collector lists it.
    """
    for name in dir(node):
        if name == "variable":
            yield node.variable
        if not name.startswith("_raw_saved_"):
            continue
        with contextlib.suppress(RuntimeError):  # released by backward
            if not any(one.unpack_hook for one in _listed(getattr(node, name))):
                plain = name.removeprefix("_raw_")
                found = getattr(node, plain if plain == "saved_tensors" else f"_{plain}")
                yield from (one for one in _listed(found) if isinstance(one, torch.Tensor))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


class Tables(TorchDispatchMode):
    """Storages that no instrument counts.

    Tensors that say how to compute (lengths, numbers of rows, meshes of ranks) have values in a
    planned job, too; pickled losses for the log, which another rank sends, do not exist in one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self.storages[storage._cdata] = storage  # alive: nothing else has its key
        return result

    def watch(self) -> None:
        """See what is made where modes are off; for the rest of this process."""
        from mindspeed.device import host_tensors
        from mindspeed.planner.count import fake_world

        inner = host_tensors._disable_current_modes

        @contextlib.contextmanager
        def disabled() -> Iterator[None]:
            with inner(), self:
                yield

        host_tensors._disable_current_modes = fake_world._disable_current_modes = disabled
        receive = dist.recv_object_list

        def recv_object_list(*given: Any, **named: Any) -> Any:
            with self:
                return receive(*given, **named)

        dist.recv_object_list = recv_object_list


def readings(step: Any, read: Callable[[], tuple[int, int]]) -> list[Reading]:
    """Run a step and read the bytes alive at places of it.

    These are its ends, those of every action of the schedule and of the optimizer's calls, and
    where a layer begins in a forward.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerLayer

    from mindspeed.pipeline.schedule.megatron_work import MegatronWork

    found: list[Reading] = []
    inside: list[str] = []

    def note(name: str) -> None:
        found.append(Reading(name, *read()))

    def watched(function: Any, name: str) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            if inside:  # the work of a plan calls Megatron's steps
                return function(*given, **named)
            inside.append(name)
            try:
                result = function(*given, **named)
            finally:
                inside.pop()
            note(f"after {name}")
            return result

        return run

    def begins(module: Any, given: Any) -> None:
        if inside == ["forward_step"] or inside == ["forward"]:
            note(f"layer {module.layer_number}")

    calls = [(schedules, "forward_step"), (schedules, "backward_step")]
    calls += [(MegatronWork, x) for x in ("forward", "backward", "weight_gradients", "recompute")]
    calls += [(step.model.optimizer, "step"), (step.model.optimizer, "zero_grad")]
    with contextlib.ExitStack() as stack:
        for owner, name in calls:
            inner = getattr(owner, name)
            own = name in vars(owner)
            stack.callback(setattr if own else _remove, owner, name, *([inner] if own else []))
            setattr(owner, name, watched(inner, name))
        for chunk in step.model.chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    stack.callback(module.register_forward_pre_hook(begins).remove)
        note("start")
        step.run()
    gc.collect()
    note("end")
    return found


ACTIONS = frozenset(
    f"after {name}"
    for name in (
        *("forward_step", "backward_step"),
        *("forward", "backward", "weight_gradients", "recompute"),
    )
)
"""Names of the ends of actions."""


def _remove(owner: Any, name: str) -> None:
    delattr(owner, name)


def real(
    flags: str, expected: Sequence[Sequence[Reading]], ranks: Sequence[int], imbalance: float = 1.0
) -> list[Reading]:
    """Readings of the second step of this rank, which runs.

    Args:
        flags: added to the tiny model's.
        expected: readings that are expected of each of ``ranks``; they decide only how long the
            walk waits for threads of gloo.
        ranks: ranks with expected readings.
        imbalance: of the routing.
    """
    from mindspeed.instruments.live_memory import LiveMemory
    from mindspeed.journal import Journal
    from mindspeed.planner.count import balanced_routing as routing
    from mindspeed.planner.count.fake_world import keep_meshes_real
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.training import setup
    from tests.planner.real_and_fake import _args

    rank = int(os.environ["RANK"])
    args = _args(flags, int(os.environ["WORLD_SIZE"]))
    args.check_for_nan_in_loss_and_grad = False
    setup.initialize(args)
    walk = Walk()
    if args.use_megatron_fsdp:  # on the host, whatever the device
        keep_meshes_real(Journal())
    routing.logits_of = routing.logits_of.__wrapped__  # kept for the next call else
    with routing.balanced_routing(args, imbalance):
        if rank not in ranks:
            step = StepOfRank(args, LiveMemory())
            step.run()
            step.run()
            return []
        step = StepOfRank(args, LiveMemory())
        step.run()
        gc.collect()
        values = iter([one.alive for one in expected[list(ranks).index(rank)]])
        return readings(step, lambda: (walk.settled(next(values, None)), 0))


def fake(
    flags: str, world: int, ranks: Sequence[int], imbalance: float = 1.0
) -> list[list[Reading]]:
    """The same of ranks of a job of which nothing runs, by the planner's counter."""
    from mindspeed.planner import isolated

    return [isolated.call(_fake, flags, world, rank, imbalance) for rank in ranks]


def _fake(flags: str, world: int, rank: int, imbalance: float) -> list[Reading]:
    from mindspeed.planner.count.balanced_routing import planned_rank
    from mindspeed.planner.count.counted_step import no_collections
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.planner.count.step_counter import StepCounter
    from mindspeed.planner.expert_loads import ExpertLoads
    from tests.planner.real_and_fake import _args

    args = _args(flags, world, "--dry-run")
    args.expert_loads = ExpertLoads(imbalance)
    with planned_rank(args, rank) as own, no_collections(), StepCounter() as counter:
        step = StepOfRank(own, counter)
        step.run()
        gc.collect()
        with counter.counting():
            return readings(step, lambda: (counter.total + counter.host, counter.host))


def spliced(flags: str, world: int, stages: Sequence[int]) -> list[list[int]] | str:
    """Bytes after each action of pipeline ranks, spliced from small ones; or why they are not."""
    from mindspeed.errors import MindSpeedError
    from mindspeed.planner import isolated
    from mindspeed.planner.compose.compose import describes
    from mindspeed.planner.compose.job import Tracer
    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import layout_of
    from mindspeed.planner.shape import shape_of
    from tests.planner.real_and_fake import words_of

    job = Job(words_of(flags))

    def shape() -> Any:
        args = job.settings({}, world).args
        layout, found = layout_of(args), shape_of(args)
        said = describes(job, layout, args)
        return layout, found, found.unspliceable or ("" if said else "flags beyond its layout's")

    layout, found, whole = isolated.call(shape)
    if whole:
        return f"counted whole: {whole}"
    try:
        traces = Tracer(job).exact(layout, found, stages)
    except MindSpeedError as error:
        return str(error)
    return [[one.static.total() + level for level in one.step.after] for one in traces]


def differences(real: Sequence[Reading], fake: Sequence[Reading]) -> list[str]:
    """Places at which two ranks differ."""
    if [one.place for one in real] != [one.place for one in fake]:
        return [f"places differ: {len(real)} and {len(fake)}"]
    return [
        f"{index} {a.place}: {a.alive - b.alive:+d}"
        for index, (a, b) in enumerate(zip(real, fake, strict=True))
        if a.alive != b.alive
    ]
