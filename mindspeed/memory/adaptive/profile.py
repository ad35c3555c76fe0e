"""What was measured of the layers of a rank, and the largest values of all ranks of its stage."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed.device import Device
from mindspeed.memory import agreement
from mindspeed.memory.candidates import name_of
from mindspeed.memory.estimate import Clock, Cost, like_activations, try_plan
from mindspeed.memory.plan import LayerPlan
from mindspeed.memory.runtime import Runtime
from mindspeed.memory.solver import Candidate

_COPIED = 16 * 2**20
_BYTES = ("kept", "transient", "host")
_UNKNOWN = -1
Candidates = tuple[Candidate, ...]


@dataclass
class Kind:
    """Layers with equal sites and shapes, and what was measured of one of them."""

    plans: list[LayerPlan]
    costs: list[list[Cost]] = field(default_factory=list)  # of each try, one of each plan
    forward: list[float] = field(default_factory=list)  # seconds of the layer
    needs: dict[str, int] = field(default_factory=dict)  # of backward, by the name of the plan
    chosen: int = 0  # plans that were chosen to be measured in a step

    def needed(self, plan: str, nbytes: int) -> None:
        """A backward under a plan needed bytes beyond those that were there when it began."""
        self.needs[plan] = max(nbytes, self.needs.get(plan, 0))

    def next_plan(self) -> LayerPlan:
        """One after the other; the last one, which is in force anyway, is left out."""
        plan = self.plans[self.chosen % max(1, len(self.plans) - 1)]
        self.chosen += 1
        return plan

    def try_all(
        self,
        runtime: Runtime,
        name: str,
        forward: Callable[..., Any],
        arguments: tuple[Any, Any],
        clock: Clock,
    ) -> None:
        """Call a layer once under each plan, with equal random states; they stay as they are."""

        def call() -> object:
            args, kwargs = like_activations(arguments)
            return forward(*args, **kwargs)

        costs = []
        for plan in self.plans:
            with runtime.environment(name)():
                costs.append(try_plan(runtime, name, call, plan, clock))
        with runtime.environment(name)():
            self.forward.append(clock(call))
        self.costs.append(costs)

    def numbers(self) -> Iterator[int]:
        """Bytes and nanoseconds of all plans, and of the forward."""
        for plan, tries in zip(self.plans, zip(*self.costs, strict=True), strict=True):
            yield from (max(getattr(one, name) for one in tries) for name in _BYTES)
            yield int(1e9 * statistics.median(one.seconds for one in tries))
            yield self.needs.get(name_of(plan), _UNKNOWN)
        yield int(1e9 * statistics.median(self.forward))

    def read(self, numbers: Iterator[int]) -> tuple[Candidates, Candidates, float]:
        """The candidates, the least that they need, and seconds of the forward, of all ranks.

        Where no backward was measured, it needs what second runs rebuild, and as much more as the
        plan needs that was measured and whose backward exceeds its second runs most.
        """
        rows = [[next(numbers) for _ in range(5)] for _ in self.plans]
        more = max((need - row[1] for *row, need in rows if need != _UNKNOWN), default=0)
        candidates, bounds = [], []
        for plan, (kept, rebuilt, host, nanoseconds, need) in zip(self.plans, rows, strict=True):
            known = need != _UNKNOWN
            most, least = rebuilt + max(0, more), max(0, rebuilt - kept)
            one = Candidate(name_of(plan), kept, nanoseconds / 1e9, need if known else most, host)
            candidates.append(one)
            bounds.append(one if known else replace(one, transient=least))
        return tuple(candidates), tuple(bounds), next(numbers) / 1e9


@dataclass(frozen=True)
class Measured:
    """Agreed between all ranks of a stage.

    Attributes:
        candidates: of each kind.
        bounds: the same with the least that a backward needs which was not measured.
        forward: seconds of a layer of each kind.
        seconds_per_host_byte: of a copy to the host and back.
    """

    candidates: list[Candidates]
    bounds: list[Candidates]
    forward: list[float]
    seconds_per_host_byte: float


def agree(
    kinds: Sequence[Kind], groups: Sequence[Any], device: Device, clock: Clock, *, copies: bool
) -> Measured:
    """The largest values over the ranks of ``groups``; ``copies``: time a copy to the host, too."""
    own = [number for kind in kinds for number in kind.numbers()]
    own.append(int(1e15 * _seconds_per_host_byte(device, clock)) if copies else 0)
    numbers = iter(agreement.largest(own, groups, device.torch_device()))
    read = [kind.read(numbers) for kind in kinds]
    return Measured(
        candidates=[candidates for candidates, _, _ in read],
        bounds=[bounds for _, bounds, _ in read],
        forward=[seconds for *_, seconds in read],
        seconds_per_host_byte=next(numbers) / 1e15,
    )


def _seconds_per_host_byte(device: Device, clock: Clock) -> float:
    tensor = torch.zeros(_COPIED, dtype=torch.uint8, device=device.torch_device())
    host = torch.empty(_COPIED, dtype=torch.uint8)
    return clock(lambda: tensor.copy_(host.copy_(tensor))) / _COPIED
