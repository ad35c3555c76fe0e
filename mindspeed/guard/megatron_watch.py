"""Shows the tensors of a step in the order in which a rank computes them, with their names.

    forward     outputs of all modules, then the loss
    recompute   the same again, inside the backward
    backward    gradients of these outputs, and of weights, as they arrive

Every tensor that a module returns is visited once, by the innermost module that returns it. Names
are those of :mod:`mindspeed.compare.names`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from mindspeed.adaptor.training_steps import MicroBatchNumbers
from mindspeed.compare.megatron_modules import global_names, named_modules, unwrapped
from mindspeed.compare.names import depth
from mindspeed.instruments.instrument import in_backward

_PASSES = ("begin", "forward", "recompute", "backward", "end")


class Where(NamedTuple):
    """Place of a tensor in a step.

    Attributes:
        when: One of ``forward``, ``recompute`` and ``backward``; ``begin`` and ``end`` of weights.
        micro_batch: Its number in the step, over all data-parallel ranks.
        module: Path in the whole model.
        what: ``output``, ``gradient``, ``gradient of weight`` ...
    """

    when: str
    micro_batch: int
    module: str
    what: str

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, {self.when}, {self.module}, {self.what}"


def order_of(where: Where) -> tuple[int, int, int]:
    """What comes first in a step, on whatever rank: pass, micro-batch, depth of the module."""
    level = depth(where.module)
    backwards = where.when not in ("begin", "forward")
    return (_PASSES.index(where.when), where.micro_batch, -level if backwards else level)


class StepWatch:
    """Visits the tensors of a step on this rank.

    Args:
        chunks: As the schedule gets them.
        visit: Gets each tensor ``[...]`` and where it is.
    """

    def __init__(self, chunks: list[Any], visit: Callable[[Where, torch.Tensor], None]) -> None:
        self._chunks, self._visit = chunks, visit
        self._number = self._passed = 0
        self._inside: list[str] = []
        self._last: torch.Tensor | None = None

    @property
    def innermost(self) -> str:
        """The module that runs; empty between modules, and in the backward."""
        return self._inside[-1] if self._inside else ""

    @contextmanager
    def watching(self, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Hooks, and the arguments of the schedule that change while they are there."""
        handles = []
        for name, module in named_modules(self._chunks):
            enter = functools.partial(self._enter, name)
            handles.append(module.register_forward_pre_hook(enter))
            leave = functools.partial(self._leave, name)
            handles.append(module.register_forward_hook(leave))
        for name, kind, parameter in named_parameters(self._chunks):
            if parameter.requires_grad:
                hook = functools.partial(self._gradient, name, f"gradient of {kind}", None)
                handles.append(parameter.register_hook(hook))
        try:
            yield {"forward_step_func": self._numbered(options["forward_step_func"])}
        finally:
            for handle in handles:
                handle.remove()

    def _numbered(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """A forward step that notes which micro-batch runs, and visits its loss."""
        numbers = MicroBatchNumbers()

        @functools.wraps(forward_step)
        def run(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            number = numbers.next(model)
            self._number, self._last = number, None
            self._inside.clear()
            output, loss_function = forward_step(data_iterator, model, *args, **kwargs)

            @functools.wraps(loss_function)
            def loss(*given: Any, **named: Any) -> Any:
                self._number = number
                found = loss_function(*given, **named)
                value = found[0] if isinstance(found, tuple) else found
                self._visit(Where("forward", number, "loss", "output"), value)
                return found

            return output, loss

        return run

    def _enter(self, name: str, module: Any, args: Any) -> None:
        self._inside.append(name)

    def _leave(self, name: str, module: Any, args: Any, output: Any) -> None:
        while self._inside and self._inside.pop() != name:
            pass  # a module that was left by an exception
        again = in_backward()
        when, number = ("recompute", self._passed) if again else ("forward", self._number)
        for one in output if isinstance(output, tuple | list) else (output,):
            if not isinstance(one, torch.Tensor) or not one.is_floating_point():
                continue
            if one is self._last:
                continue  # of the module inside, which has visited it
            self._last = one
            self._visit(Where(when, number, name, "output"), one)
            if one.requires_grad:
                bound = None if again else number
                one.register_hook(functools.partial(self._gradient, name, "gradient", bound))

    def _gradient(self, name: str, what: str, number: int | None, gradient: Any) -> None:
        if number is not None:
            self._passed = number
        self._visit(Where("backward", self._passed, name, what), gradient)


def named_parameters(chunks: list[Any]) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Module, kind and tensor of each parameter of a rank; the module with its global name."""
    for chunk in map(unwrapped, chunks):
        names = global_names(chunk)
        for path, parameter in chunk.named_parameters():
            module, _, kind = path.rpartition(".")
            yield names[module], kind, parameter
