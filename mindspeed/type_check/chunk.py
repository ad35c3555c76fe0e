"""A chunk of a model with types: its axes, its parameters, and the first wrong use in words.

The types of the parameters are what the end of backward does to their gradients
(:mod:`.megatron`). Nothing here knows where the model comes from: a job
(:mod:`.stage`), or a Megatron that this library does not change.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from spmd_types import MeshAxis, SpmdTypeError
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mindspeed.spmd import I, P, R, Type, V
from mindspeed.type_check import megatron
from mindspeed.type_check.tensor_types import WrongType, give, types_of

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
class Mesh:
    """The axes of the job that have more than one rank, and what varies over them.

    Axes are the largest sets of ranks of which each group contains all or nothing: tensor-parallel
    ranks are two axes (``tensor 1``, ``tensor 2``) on a grid, data-parallel ranks where experts are
    spread over a part of them.

    Attributes:
        axes: by name.
        experts: those over which the experts are spread.
    """

    axes: dict[str, MeshAxis]
    experts: frozenset[MeshAxis]

    @property
    def tensor(self) -> tuple[MeshAxis, ...]:
        """The axes of the tensor-parallel ranks; empty for one rank."""
        return tuple(one for name, one in self.axes.items() if name.split()[0] == "tensor")

    @property
    def context(self) -> tuple[MeshAxis, ...]:
        """The axes of the ranks that share the sequences; empty for one rank."""
        return tuple(one for name, one in self.axes.items() if name.split()[0] == "context")

    def types(self, tensor: Type, other: Type) -> dict[MeshAxis, Type]:
        """One type on the tensor-parallel ranks, one on all other axes."""
        return {axis: tensor if axis in self.tensor else other for axis in self.axes.values()}

    def named(self, text: str) -> str:
        """A message of the checker, with the names of this mesh."""
        for name, axis in self.axes.items():
            text = text.replace(str(axis), f"{name} parallel ranks")
        return text

    def name(self, axis: Any) -> str | None:
        """``tensor``, ``data`` or ``context``."""
        return next((name for name, one in self.axes.items() if one == axis), None)


def mesh_of_job(further: Iterable[Any] = ()) -> Mesh:
    """The axes of the process groups that Megatron has made.

    Args:
        further: groups of a part of the tensor-parallel ranks.
    """
    groups = megatron.Axes.of_job()
    named = {"tensor": groups.tensor, "data": groups.data, "context": groups.context}
    spread = [MeshAxis.of(one) for one in (groups.expert, groups.expert_tensor) if one.size() > 1]
    whole = {name: MeshAxis.of(group) for name, group in named.items() if group.size() > 1}
    others = [*whole.values(), *spread, *map(MeshAxis.of, further)]
    axes: dict[str, MeshAxis] = {}
    for name, axis in whole.items():
        parts = _parts(axis, others)
        numbers = [""] if len(parts) == 1 else [f" {number + 1}" for number in range(len(parts))]
        axes |= {name + number: part for number, part in zip(numbers, parts, strict=True)}
    experts = {axis for axis in axes.values() for one in spread if not one.isorthogonal(axis)}
    return Mesh(axes, frozenset(experts))


def _parts(axis: MeshAxis, others: Iterable[MeshAxis]) -> list[MeshAxis]:
    """The largest parts of an axis of which every other one has all or nothing.

    The axis itself where the sizes do not divide each other.
    """
    digits = [digit for one in (axis, *others) for digit in one.layout.sizes_and_strides]
    cuts = sorted({cut for size, stride in digits for cut in (stride, stride * size)})
    found = []
    for size, stride in sorted(axis.layout.sizes_and_strides, key=lambda digit: digit[1]):
        own = [cut for cut in cuts if stride <= cut <= stride * size]
        if any(after % before for before, after in pairwise(own)):
            return [axis]
        found += [MeshAxis.of(after // before, before) for before, after in pairwise(own)]
    return found


def give_types(chunk: torch.nn.Module, config: Any, mesh: Mesh) -> dict[Type, int]:
    """Give the parameters and other tensors of a chunk their types.

    Args:
        config: Megatron's, of the model.

    Returns:
        How many parameters have each type on the tensor-parallel ranks.
    """
    counts = dict.fromkeys(Type, 0)
    with unset_fake_temporarily():
        types = dict(_parameters(chunk, config, mesh))
    for name, parameter in chunk.named_parameters():
        give(parameter, types[name])
        if mesh.tensor:
            counts[types[name][mesh.tensor[0]]] += 1
    _give_others(chunk, mesh)
    return counts


def _parameters(
    chunk: torch.nn.Module, config: Any, mesh: Mesh
) -> Iterator[tuple[str, dict[MeshAxis, Type]]]:
    """The type of each parameter: what happens to its gradient."""
    summed = megatron.sums_over_tensor_ranks(chunk, config, megatron.Axes.of_job().tensor)
    for name, parameter in chunk.named_parameters():
        routed = ".experts." in name and "shared" not in name
        parameter.routed_expert = routed  # type: ignore[attr-defined]
        parameter.checked_name = name  # type: ignore[attr-defined]
        on_tensor = _on_tensor_ranks(parameter, routed, summed.get(name))
        types = mesh.types(on_tensor, R)  # data parallelism sums
        if routed:
            types |= dict.fromkeys(mesh.experts, V)
        yield name, types


def _on_tensor_ranks(parameter: torch.nn.Parameter, routed: bool, summed: Type | None) -> Type:
    if routed:  # data parallelism of experts sums over the tensor-parallel ranks, too
        return I if getattr(parameter, "allreduce", True) else R
    if getattr(parameter, "tensor_model_parallel", False):
        return V
    return summed or I


def _give_others(chunk: torch.nn.Module, mesh: Mesh) -> None:
    """Buffers and other tensors of modules (rotary frequencies) are the same everywhere."""
    for module in chunk.modules():
        for value in [*vars(module).values(), *module._buffers.values()]:
            plain = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
            if plain and not value.requires_grad:
                give(value, mesh.types(R, R))


def as_term(loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The sum of a rank's losses, as a term of the sum over the ranks that share the sequences."""
    return give(loss.clone(), types_of(loss) | dict.fromkeys(mesh.context, P))


def check_loss(loss: torch.Tensor, mesh: Mesh, *, whole: bool = False) -> None:
    """Check what a backward starts from.

    Args:
        loss: of a micro-batch, a scalar.
        whole: it is no sum over tokens: the ranks that share a sequence must have the same one.

    Raises:
        WrongType: tensor-parallel ranks have different ones, or another rank has the same.
    """
    for axis, found in types_of(loss).items():
        needed: tuple[Type, ...] = (
            (I, P) if axis in mesh.tensor else (V, P)
        )  # elsewhere ranks have other tokens
        if whole and axis in mesh.context:
            needed = (I,)
        if found not in needed:
            raise WrongType("the loss", axis, found, needed)


def wrong_use(stage: int, mesh: Mesh, error: SpmdTypeError) -> WrongUse:
    """An error of the checker, at the innermost line of the program that it checked."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [one for one in frames if not any(part in one.filename for part in _OUTSIDE)]
    # What the program returns is looked at outside of it.
    place = inside[-1] if inside else vars(error).get("place", frames[-1])
    names = tuple(vars(error).get("parameters", ()))
    where = stage, place.filename, place.lineno or 0, place.name
    if not isinstance(error, WrongType):
        return WrongUse(*where, "", names, None, None, (), mesh.named(str(error)))
    axis = mesh.name(error.axis)
    return WrongUse(*where, error.what, names, axis, error.found, error.needed, "")
