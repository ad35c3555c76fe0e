"""How a fault gets into a Megatron job: into a module's ``forward``, a gradient, a function.

What is changed is inside a module's ``forward``, so that the hooks of a recording see what a real
fault would show them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Plant = Callable[[Any, int], None]


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        plant: Changes a chunk of the model once it is built; gets the global rank.
        expected: Passes, modules and kinds of the tensors one of which is named.
        needs: Tags of the layouts in which it exists (:func:`tests.compare.layouts.chosen`).
        narrow: bf16 can show it.
        job: Of :data:`tests.compare.layouts.JOBS`.
        before: Called before the model is built.
    """

    plant: Plant
    expected: tuple[tuple[str, str, str], ...]
    needs: tuple[str, ...] = ()
    narrow: bool = True
    job: str = "dense"
    before: Callable[[], None] | None = None


def nothing(chunk: Any, rank: int) -> None:
    """Of a fault that is in a function."""


def at(chunk: Any, path: str) -> Any:
    """A module by its path in the whole model; None on other stages."""
    found = re.match(r"decoder\.layers\.(\d+)\.?(.*)", path)
    if found is None:
        first, _, _ = path.partition(".")
        return chunk.get_submodule(path) if getattr(chunk, first, None) is not None else None
    for layer in chunk.decoder.layers:
        if layer.layer_number - 1 == int(found[1]):
            return layer.get_submodule(found[2])
    return None


def is_odd() -> bool:
    """Whether this is the last rank of its stage."""
    from megatron.core import parallel_state as state

    return all(
        (
            state.get_tensor_model_parallel_rank() + 1
            == state.get_tensor_model_parallel_world_size(),
            state.get_context_parallel_rank() + 1 == state.get_context_parallel_world_size(),
            state.get_data_parallel_rank() + 1 == state.get_data_parallel_world_size(),
        )
    )


def odd(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change on the last rank of the stage only."""
    return lambda x: change(x) if is_odd() else x


def around(path: str, change: Callable[..., Any]) -> Plant:
    """A fault in a module: ``change(forward, *args, **kwargs)`` instead of its forward."""

    def plant(chunk: Any, rank: int) -> None:
        module = at(chunk, path)
        if module is None:
            return
        forward = module.forward
        module.forward = lambda *args, **kwargs: change(forward, *args, **kwargs)

    return plant


def module_of(path: str, change: Callable[[Any], None]) -> Plant:
    """A fault in a module's attributes."""

    def plant(chunk: Any, rank: int) -> None:
        if (module := at(chunk, path)) is not None:
            change(module)

    return plant


def output(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """A fault in what a module returns."""

    def changed(forward: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if isinstance(result, tuple):
            return (change(result[0]), *result[1:])
        return change(result)

    return around(path, changed)


def inside(path: str, change: Callable[[torch.Tensor], torch.Tensor], index: int = 0) -> Plant:
    """A fault in what a module makes of an argument."""

    def changed(forward: Any, *args: Any, **kwargs: Any) -> Any:
        args = (*args[:index], change(args[index]), *args[index + 1 :])
        return forward(*args, **kwargs)

    return around(path, changed)


def recomputing() -> bool:
    """Whether a backward runs: of a forward, that it is a second one."""
    return bool(torch._C._current_graph_task_id() != -1)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Any) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(gradient), None


def backwards(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A change of a tensor's gradient."""
    return lambda x: _WrongGradient.apply(x, change)


def gradient(path: str, change: Callable[[torch.Tensor], torch.Tensor], index: int = 0) -> Plant:
    """A fault in the gradient of a module's input."""
    return inside(path, backwards(change), index)


def loaded(path: str, change: Callable[[Any], None]) -> Plant:
    """A fault in a module's weights, once they are loaded."""

    def plant(chunk: Any, rank: int) -> None:
        module = at(chunk, path)
        if module is None:
            return
        load = chunk.load_state_dict

        def changed(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            with torch.no_grad():
                change(module)
            return result

        chunk.load_state_dict = changed

    return plant


def parameter_gradient(path: str, change: Callable[[torch.Tensor, int], Any]) -> Plant:
    """A fault in the gradients of a module's weights, or of all; gets the call's number, too."""

    def plant(chunk: Any, rank: int) -> None:
        owner = at(chunk, path) if path else chunk
        for parameter in owner.parameters() if owner is not None else ():
            count = [0]

            def hook(x: torch.Tensor, count: list[int] = count) -> Any:
                count[0] += 1
                return change(x, count[0])

            parameter.register_hook(hook)

    return plant


def function(owner: str, name: str, make: Callable[[Any], Any]) -> Plant:
    """A fault in a function: ``make(right)`` instead of the attribute ``name`` of ``owner``.

    ``owner`` is a module, or a class behind a colon.
    """

    def plant(chunk: Any, rank: int) -> None:
        import importlib

        path, _, inner = owner.partition(":")
        holder = importlib.import_module(path)
        holder = getattr(holder, inner) if inner else holder
        right = getattr(holder, name)
        if not getattr(right, "is_planted", False):
            wrong = make(right)
            wrong.is_planted = True
            setattr(holder, name, wrong)

    return plant


def without(*repairs: str) -> Callable[[], None]:
    """Megatron without some of this library's repairs: natural faults."""

    def before() -> None:
        from mindspeed import session

        for repair in repairs:
            session.current().engine.remove(f"repair:{repair}")

    return before


def flipped(x: torch.Tensor) -> torch.Tensor:
    """One exponent bit of one value, on the last rank."""
    if not is_odd():
        return x
    y = x.detach().clone(memory_format=torch.contiguous_format)
    kind, bit = (torch.int32, 28) if x.element_size() == 4 else (torch.int16, 12)
    y.view(-1)[7:8].view(kind).bitwise_xor_(1 << bit)
    return x + (y - x.detach())
