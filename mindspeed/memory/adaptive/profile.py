"""What was measured: the layers of a rank, and the peaks of a step by its sections.

Of layers, the largest values of all ranks of a stage count. The sections of a step:

    forward | head | backward of layer n | ... | backward of layer 1 | front | forward | ...

A layer's section begins when the gradient of its output is there and ends where that of the layer
before begins; what its backward needs is the peak of the section less what was allocated when it
began. ``head`` is everything from the end of the last layer's forward to its backward, ``front``
everything after the first layer's backward: the gradient of the embedding, the next embedding.
A step that is measured can be repeated: :class:`StepReplay` has its micro-batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed.device import Device
from mindspeed.memory import agreement
from mindspeed.memory.estimate import Clock, PlanCost, like_activations, name_of, try_plan
from mindspeed.memory.plan import LayerPlan
from mindspeed.memory.runtime import Runtime
from mindspeed.memory.solver import PlanCandidate

_COPIED = 16 * 2**20
_BYTES = ("kept", "transient", "host")
_UNKNOWN = -1
Candidates = tuple[PlanCandidate, ...]


@dataclass
class LayerKind:
    """Layers with equal sites and shapes, and what was measured of one of them."""

    plans: list[LayerPlan]
    costs: list[list[PlanCost]] = field(default_factory=list)  # of each try, one of each plan
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
            one = PlanCandidate(
                name_of(plan), kept, nanoseconds / 1e9, need if known else most, host
            )
            candidates.append(one)
            bounds.append(one if known else replace(one, transient=least))
        return tuple(candidates), tuple(bounds), next(numbers) / 1e9


@dataclass(frozen=True)
class MeasuredLayers:
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
    kinds: Sequence[LayerKind], groups: Sequence[Any], device: Device, clock: Clock, *, copies: bool
) -> MeasuredLayers:
    """The largest values over the ranks of ``groups``; ``copies``: time a copy to the host, too."""
    own = [number for kind in kinds for number in kind.numbers()]
    own.append(int(1e15 * _seconds_per_host_byte(device, clock)) if copies else 0)
    numbers = iter(agreement.largest(own, groups, device.torch_device()))
    read = [kind.read(numbers) for kind in kinds]
    return MeasuredLayers(
        candidates=[candidates for candidates, _, _ in read],
        bounds=[bounds for _, bounds, _ in read],
        forward=[seconds for *_, seconds in read],
        seconds_per_host_byte=next(numbers) / 1e15,
    )


def _seconds_per_host_byte(device: Device, clock: Clock) -> float:
    tensor = torch.zeros(_COPIED, dtype=torch.uint8, device=device.torch_device())
    host = torch.empty(_COPIED, dtype=torch.uint8)
    return clock(lambda: tensor.copy_(host.copy_(tensor))) / _COPIED


FORWARD, HEAD, FRONT = "forward", "head", "front"


@dataclass
class SectionPeaks:
    """Bytes of the device: the most in each kind of section, over a step.

    Attributes:
        begins: allocated when a chunk's first layer begins its backward, the last of the chunk.
        head: peak of the heads.
        front: peak of the fronts.
    """

    begins: int = 0
    head: int = 0
    front: int = 0


class Sections:
    """Divides steps of one rank into sections.

    Attributes:
        peaks: of the step.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._most, self._allocated = 0, 0
        self._section: Any = FORWARD
        self._ended: Callable[[int], None] | None = None
        self.peaks = SectionPeaks()

    def begin_step(self) -> None:
        """Reset all measurements."""
        self._device.reset_peak_memory()
        self._most, self._section, self._ended = 0, FORWARD, None
        self.peaks = SectionPeaks()

    def peak(self) -> int:
        """The most bytes since the step began."""
        return max(self._most, self._device.memory_stats().peak)

    def enter(
        self, section: str, ended: Callable[[int], None] | None = None, first: bool = False
    ) -> None:
        """Begin a section; ``ended`` gets the bytes that it needed beyond those at its begin."""
        stats = self._device.memory_stats()
        self._most = max(self._most, stats.peak)
        if self._section == HEAD:
            self.peaks.head = max(self.peaks.head, stats.peak)
        elif self._section == FRONT:
            self.peaks.front = max(self.peaks.front, stats.peak)
        if self._ended is not None:
            self._ended(stats.peak - self._allocated)
        if first:
            self.peaks.begins = max(self.peaks.begins, stats.allocated)
        self._section, self._ended, self._allocated = section, ended, stats.allocated
        self._device.reset_peak_memory()


def on_gradient(tensors: Any, call: Callable[[], None]) -> bool:
    """Call once the gradient of the (first) tensor is there; False if it gets none."""
    tensor = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
    if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
        return False

    def hook(_: torch.Tensor) -> None:
        call()

    tensor.register_hook(hook)
    return True


class StepReplay:
    """Remembers the micro-batches of one step.

    Args:
        source: the data iterator, whose attributes it has; None on stages that read nothing.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._next = source, 0
        self._read: list[Any] = []

    def from_the_start(self) -> StepReplay | None:
        """The iterator at the first micro-batch; None if there is no source."""
        self._next = 0
        return None if self._source is None else self

    def __iter__(self) -> StepReplay:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            self._read.append(next(self._source))
        self._next += 1
        return self._read[self._next - 1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
