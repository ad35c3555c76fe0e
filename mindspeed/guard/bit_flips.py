"""A step computed twice: a fault of a device changes bits, a wrong program does not.

Copies on other ranks do not show a value that was wrong before a sum over ranks: all get the same
wrong sum. So a step is computed again with the same data and random numbers, before the optimizer,
and the bits of everything are compared: what modules return, gradients of that, reduced gradients
of weights. If something differs, a third time tells why: equal to one of the two, and the other one
was a fault; different from both, and the program does not repeat itself (atomic additions), so
that this guard sees nothing and is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.compare.digest import bits
from mindspeed.guard.megatron_replay import ReplayedStep, gradient_of
from mindspeed.guard.megatron_watch import StepWatch, Where, named_parameters, order_of


@dataclass(frozen=True)
class Flip:
    """The first tensor of a rank that differs.

    Attributes:
        rank: Global.
        where: The tensor.
        index: In the order of the rank.
        wrong: Which computation differs from the other two: 1, 2 or 3; 0: all three differ.
    """

    rank: int
    where: Where
    index: int
    wrong: int

    @property
    def order(self) -> tuple[int, ...]:
        """Smallest for what the others follow from."""
        return (*order_of(self.where), self.index)


class TwiceComputed:
    """The bits of a step, computed up to three times.

    Args:
        step: That is computed.
    """

    def __init__(self, step: ReplayedStep) -> None:
        self._step = step
        self._names: list[Where] = []
        self._bits: list[torch.Tensor] = []

    def first(self, changes: dict[str, Any]) -> Any:
        """Compute the step; what the schedule returns.

        Args:
            changes: Other arguments of the schedule.
        """
        return self._run(self._step.run, changes)

    def flips(self) -> list[Flip]:
        """Compute it again, and once more if something differs. Collective.

        Returns:
            Of each rank where something differs the first tensor; empty if all is equal.
        """
        self._run(self._step.run_again)
        if not _anywhere(not torch.equal(*self._bits)):
            return []
        self._run(self._step.run_again)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._first_flip())
        return [one for one in found if one is not None]

    def _first_flip(self) -> Flip | None:
        one, two, three = self._bits
        different = (one != two) | (one != three)
        if not bool(different.any()):
            return None
        at = int(different.nonzero()[0])
        a, b, c = (int(each[at]) for each in self._bits)
        wrong = {b == c: 1, a == c: 2, a == b: 3}.get(True, 0)
        return Flip(dist.get_rank(), self._names[at], at, wrong)

    def _run(self, compute: Any, changes: dict[str, Any] | None = None) -> Any:
        names: list[Where] = []
        found: list[torch.Tensor] = []

        def visit(where: Where, x: torch.Tensor) -> None:
            names.append(where)
            found.append(bits(x))

        step = self._step
        with StepWatch(step.chunks, visit).watching({**step.options, **(changes or {})}) as more:
            result = compute(more)
        for module, kind, parameter in named_parameters(step.chunks):
            gradient = gradient_of(parameter)
            if gradient is not None:
                visit(Where("end", -1, module, f"gradient of {kind}"), gradient)
        self._names = names
        self._bits.append(torch.stack(found).cpu())
        return result


def origin_of(flips: Sequence[Flip]) -> list[Flip]:
    """The first differences of ranks that the others follow from."""
    first = min(flips, key=lambda one: one.order)
    return [one for one in flips if one.order == first.order]


def _anywhere(flag: bool) -> bool:
    """Whether it is so on a rank; 4 bytes. Collective."""
    total = torch.tensor([int(flag)], dtype=torch.int32, device=device.current().torch_device())
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return bool(total.item())
