"""One pipeline stage of a job: built as the job builds it, typed, run forward once.

In a process without accelerators and other ranks: torch's fake process groups of the job's size,
FakeTensors, real code of Megatron. The types of the parameters are what the end of backward does
to their gradients (:mod:`.megatron`); those of the batch and of received activations are what the
layout says. The first use of a tensor that does not fit is the result.
"""

from __future__ import annotations

import argparse
import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
from spmd_types import MeshAxis, SpmdTypeError
from spmd_types.checker import typecheck
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mindspeed.built_model import BuiltModel
from mindspeed.job import Parallel
from mindspeed.journal import Journal
from mindspeed.planner.counted.balanced_routing import assumed_routing
from mindspeed.planner.counted.fake_world import PlannedTensors, fake_world
from mindspeed.planner.counted.loop import TrainerLoop, loop_of, readers_of
from mindspeed.spmd import I, P, R, Type, V
from mindspeed.type_check import megatron, rules
from mindspeed.type_check.rules import WrongType

_OUTSIDE = ("/torch/", "/spmd_types/", "/mindspeed/type_check/", "/mindspeed/spmd.py")


@dataclass(frozen=True)
class WrongUse:
    """The first use of a tensor whose type does not fit.

    Attributes:
        stage: pipeline stage.
        file: of the line.
        line: of the use.
        function: around it.
        what: was used.
        parameters: that the use read, by name.
        axis: ranks that share the work: ``tensor``, ``data``, ``context``.
        found: type of the tensor; None where the checker says it in ``detail``.
        needed: types that would fit.
        detail: of the checker.
    """

    stage: int
    file: str
    line: int
    function: str
    what: str
    parameters: tuple[str, ...]
    axis: str | None
    found: Type | None
    needed: tuple[Type, ...]
    detail: str


@dataclass(frozen=True)
class StageResult:
    """What was found in a pipeline stage.

    Attributes:
        stage: its number.
        parameters: how many parameters have each type on the tensor-parallel ranks.
        wrong: the first wrong use; None if every gradient is summed as it must be.
    """

    stage: int
    parameters: dict[Type, int]
    wrong: WrongUse | None


@dataclass(frozen=True)
class _Mesh:
    """The axes of the job that have more than one rank, and what varies over them.

    Attributes:
        axes: by name.
        experts: those over which the experts are spread.
    """

    axes: dict[str, MeshAxis]
    experts: frozenset[MeshAxis]

    @property
    def tensor(self) -> MeshAxis | None:
        return self.axes.get("tensor")

    def types(self, tensor: Type, other: Type) -> dict[MeshAxis, Type]:
        """One type on the tensor-parallel ranks, one on all other axes."""
        return {axis: tensor if axis is self.tensor else other for axis in self.axes.values()}

    def named(self, text: str) -> str:
        """A message of the checker, with the names of this mesh."""
        for name, axis in self.axes.items():
            text = text.replace(str(axis), f"{name} parallel ranks")
        return text

    def name(self, axis: Any) -> str | None:
        return next((name for name, one in self.axes.items() if one == axis), None)


class ProvidedModel(TrainerLoop):
    """The loop of a framework: its model, our groups and forward step.

    Args:
        model_provider: of :func:`mindspeed.type_check.check_model`.
    """

    def __init__(self, model_provider: Callable[..., torch.nn.Module]) -> None:
        self._provider = model_provider

    def build(self, args: argparse.Namespace) -> BuiltModel:  # type: ignore[override]
        """The chunks of this rank in the precision of the job, without optimizer."""
        from megatron.core import parallel_state

        count = args.virtual_pipeline_model_parallel_size
        chunks = []
        for vp_stage in range(count) if count else [None]:
            where: dict[str, Any] = {"ignore_virtual": count is None, "vp_stage": vp_stage}
            given = {} if vp_stage is None else {"vp_stage": vp_stage}
            chunk = self._provider(
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                **given,
            )
            chunks.append(chunk.to(args.params_dtype))
        return BuiltModel(chunks[0].config, chunks)  # type: ignore[arg-type]


def check_stage(args: argparse.Namespace, stage: int) -> StageResult:
    """Check a pipeline stage, with all its chunks.

    Args:
        args: final values, of a dry run; this process is not part of a job.
        stage: number of the pipeline rank.

    Raises:
        MindSpeedError: the model cannot be built or run on FakeTensors.
    """
    rank = Parallel.of(args).first_rank_of(stage)
    args = copy.copy(args)
    journal = Journal()
    with fake_world(args, rank), PlannedTensors(), assumed_routing(args):
        model = loop_of(args).build(args)
        rules.install(journal)
        mesh = _mesh()
        try:
            with spmd_types.set_current_mesh(mesh.axes):
                return _check(args, model, mesh, stage)
        finally:
            journal.undo()


def _mesh() -> _Mesh:
    groups = megatron.Axes.of_job()
    named = {"tensor": groups.tensor, "data": groups.data, "context": groups.context}
    axes = {name: MeshAxis.of(group) for name, group in named.items() if group.size() > 1}
    spread = [
        MeshAxis.of(group) for group in (groups.expert, groups.expert_tensor) if group.size() > 1
    ]
    experts = {axis for axis in axes.values() for one in spread if not one.isorthogonal(axis)}
    return _Mesh(axes, frozenset(experts))


def _check(args: argparse.Namespace, model: Any, mesh: _Mesh, stage: int) -> StageResult:
    counts = dict.fromkeys(Type, 0)
    wrong = None
    readers = readers_of(args, model.config)
    for chunk, reader in zip(model.modules, readers, strict=True):
        with unset_fake_temporarily():
            types = dict(_parameters(chunk, model.config, mesh))
        for name, parameter in chunk.named_parameters():
            rules.give(parameter, types[name])
            if mesh.tensor is not None:
                counts[types[name][mesh.tensor]] += 1
        _give_others(chunk, mesh)
        try:
            with typecheck(strict_mode="strict", local=True):
                _run(args, chunk, reader, mesh)
        except SpmdTypeError as error:
            wrong = _wrong_use(stage, mesh, error)
            break
    return StageResult(stage, counts, wrong)


def _parameters(
    chunk: torch.nn.Module, config: Any, mesh: _Mesh
) -> Iterator[tuple[str, dict[MeshAxis, Type]]]:
    """The type of each parameter: what happens to its gradient."""
    summed = megatron.sums_over_tensor_ranks(chunk, config, megatron.Axes.of_job().tensor)
    for name, parameter in chunk.named_parameters():
        routed = ".experts." in name and "shared" not in name
        parameter.routed_expert = routed  # type: ignore[attr-defined]
        parameter.checked_name = name  # type: ignore[attr-defined]
        types = mesh.types(I, R)  # data parallelism sums
        if mesh.tensor is not None:
            types[mesh.tensor] = _on_tensor_ranks(parameter, routed, summed.get(name))
        if routed:
            types |= dict.fromkeys(mesh.experts, V)
        yield name, types


def _on_tensor_ranks(parameter: torch.nn.Parameter, routed: bool, summed: Type | None) -> Type:
    if routed:  # data parallelism of experts sums over the tensor-parallel ranks, too
        return I if getattr(parameter, "allreduce", True) else R
    if getattr(parameter, "tensor_model_parallel", False):
        return V
    return summed or I


def _give_others(chunk: torch.nn.Module, mesh: _Mesh) -> None:
    """Buffers and other tensors of modules (rotary frequencies) are the same everywhere."""
    for module in chunk.modules():
        for value in [*vars(module).values(), *module._buffers.values()]:
            plain = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
            if plain and not value.requires_grad:
                rules.give(value, mesh.types(R, R))


def _run(args: argparse.Namespace, chunk: Any, reader: Any, mesh: _Mesh) -> None:
    """Forward and loss of one micro-batch.

    Raises:
        SpmdTypeError: at the first wrong use.
    """
    from mindspeed.training.forward_step import forward_step

    hidden = mesh.types(V if args.sequence_parallel else I, V)
    if not chunk.pre_process:
        chunk.set_input_tensor(_received(args, chunk, hidden))
    output, loss_function = forward_step(_typed(reader, mesh), chunk)
    if not chunk.post_process:
        _expect("what the stage sends", output, hidden)
        return
    loss = loss_function(output)[0]
    for axis, found in rules.types_of(loss).items():
        needed = (I, P) if axis is mesh.tensor else (V, P)  # elsewhere ranks have other tokens
        if found not in needed:
            raise WrongType("the loss", axis, found, needed)


def _received(args: argparse.Namespace, chunk: Any, types: dict[MeshAxis, Type]) -> torch.Tensor:
    parallel = Parallel.of(args)
    length = args.seq_length // parallel.context
    length //= parallel.tensor if args.sequence_parallel else 1
    shape = (length, args.micro_batch_size, args.hidden_size)
    received = torch.randn(shape, dtype=args.params_dtype, requires_grad=True)
    return rules.give(received, types)


def _typed(reader: Any, mesh: _Mesh) -> Any:
    """The micro-batches of a reader with types: a rank's own tokens, equal on tensor ranks."""
    if reader is None:
        return None
    with spmd_types.no_typecheck():
        batch = next(reader)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            rules.give(value, mesh.types(I if name == "loss_mask" else R, V))
    return iter([batch])


def _expect(what: str, tensor: torch.Tensor, types: dict[MeshAxis, Type]) -> None:
    for axis, found in rules.types_of(tensor).items():
        if found is not types[axis]:
            raise WrongType(what, axis, found, (types[axis],))


def _wrong_use(stage: int, mesh: _Mesh, error: SpmdTypeError) -> WrongUse:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _OUTSIDE)
    ]
    place = frames[-1]
    names = tuple(vars(error).get("parameters", ()))
    where = stage, place.filename, place.lineno or 0, place.name
    if not isinstance(error, WrongType):
        return WrongUse(*where, "", names, None, None, (), mesh.named(str(error)))
    axis = mesh.name(error.axis)
    return WrongUse(*where, error.what, names, axis, error.found, error.needed, "")
