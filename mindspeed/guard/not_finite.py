"""Origin of the first value that is not finite: a step is computed again and looked at.

Each rank looks at its tensors where modules end, and at every operator between. Attention masks are
infinite by intent, a square may overflow in a norm whose result is finite, and memory that is not
written yet holds anything. So each result that is not finite is noted with the operator that it
follows from, and an operator is named only when a tensor that follows from it is asked for: the
output of a module, or a gradient.

A rank that only receives such a value has no operator that makes one of finite ones, so of all
ranks the origin is where an operator was found: forward before backward, earlier micro-batches and,
in the forward, earlier layers first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.guard.megatron_replay import ReplayedStep, gradient_of
from mindspeed.guard.megatron_watch import StepWatch, Where, named_parameters, order_of


@dataclass(frozen=True)
class Origin:
    """The first tensor that is not finite on a rank.

    Attributes:
        rank: Global.
        where: The tensor.
        operator: What made it of finite tensors; empty where it was received, or is a weight.
        ran: The module in which the operator ran, if it did not run between modules.
    """

    rank: int
    where: Where
    operator: str = ""
    ran: str = ""

    @property
    def order(self) -> tuple[Any, ...]:
        """Smallest for what the others follow from."""
        made = self.operator or self.where.when in ("begin", "end")
        return (not made, *order_of(self.where))

    def __str__(self) -> str:
        if self.where.when == "begin":
            return f"{self.where.module}, {self.where.what} before the step"
        if self.where.when == "end":
            return f"{self.where.module}, {self.where.what} after its sum over ranks"
        operator = f", operator {self.operator} (of finite tensors)" if self.operator else ""
        module = self.ran or self.where.module
        after = "" if module == self.where.module else f" (first in the {self.where.what} of "
        after += f"{self.where.module})" if after else ""
        where = f"micro-batch {self.where.micro_batch}, {self.where.when}, {module}"
        return f"{where}{operator}{after}"


def first_on_this_rank(step: ReplayedStep) -> Origin | None:
    """Compute a step again and find the first tensor that is not finite on this rank."""
    rank = dist.get_rank()
    for module, kind, parameter in named_parameters(step.chunks):
        if not is_finite(parameter):
            where = Where("begin", -1, module, kind)
            step.run_again()  # like all ranks
            return Origin(rank, where)
    found: list[Origin] = []

    def visit(where: Where, x: torch.Tensor) -> None:
        if found:
            return
        operator = operators.origin(x)
        of_weight = where.what.startswith("gradient of")
        if is_finite(x) or (of_weight and operator is None):
            return  # a fused product leaves memory that is not written in its place
        found.append(Origin(rank, where, *(operator or ())))
        operators.done = True

    watch = StepWatch(step.chunks, visit)
    operators = FirstNotFinite(lambda: watch.innermost)
    with watch.watching(step.options) as changes, operators:
        step.run_again(changes)
    if not found:
        for module, kind, parameter in named_parameters(step.chunks):
            gradient = gradient_of(parameter)
            if gradient is not None and not is_finite(gradient):
                return Origin(rank, Where("end", -1, module, f"gradient of {kind}"))
    return found[0] if found else None


def origin_of(found: Sequence[Origin | None]) -> list[Origin]:
    """The origin among what ranks found first: once for each rank that has it in the same place."""
    own = sorted((one for one in found if one is not None), key=lambda one: one.order)
    return [one for one in own if one.order == own[0].order and one.where == own[0].where]


_UNWRITTEN = ("empty", "new_empty")


class FirstNotFinite(TorchDispatchMode):
    """Looks at what every operator returns, until one was found.

    Args:
        where: Says what runs, when an operator is noted.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where
        self._origins: dict[int, tuple[str, str]] = {}
        self.done = False

    def origin(self, x: torch.Tensor) -> tuple[str, str] | None:
        """The operator that a tensor ``[...]`` follows from that is not finite, and what ran."""
        return None if is_finite(x) else self._origins.get(_memory(x))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note it if its result is not finite."""
        kwargs = kwargs or {}
        if self.done:
            return func(*args, **kwargs)
        name = str(func).removeprefix("aten.")
        changes = func._schema.is_mutable
        entering = list(_tensors((args, kwargs)))
        bad = [one for one in entering if not is_finite(one)] if changes else None
        result = func(*args, **kwargs)
        memory = {_memory(one) for one in entering}
        for one in _tensors(result):
            place = _memory(one)
            if name.startswith(_UNWRITTEN) or is_finite(one):
                if place not in memory:
                    self._origins.pop(place, None)
                continue
            if bad is None:
                bad = [one for one in entering if not is_finite(one)]
            own = None if bad else (name, self._where())
            origin = own or next(filter(None, (self._origins.get(_memory(x)) for x in bad)), None)
            if origin is not None:
                self._origins[place] = origin
        return result


def is_finite(x: torch.Tensor) -> bool:
    """Whether all values are; those of integers are. Waits for the device."""
    return not x.is_floating_point() or bool(torch.isfinite(x).all())


def _memory(x: torch.Tensor) -> int:
    """Equal for views of one tensor."""
    return x.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
