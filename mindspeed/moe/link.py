"""Collectives of two groups that share one link: those of one wait for those of the other.

    link = Link()
    {"rows": link.chained(AllToAll(...), "ep")}
    {"rows": link.chained(GatherRows(...), "tp")}      # starts when the all-to-all has ended

Neither then takes bandwidth from the other, in forward or in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed import device, spmd
from mindspeed.moe.split_phase import Collective, Work


@dataclass(eq=False)
class Link:
    """What is in flight on one link.

    Attributes:
        last: the last started work by group.
    """

    last: dict[str, Work] = field(default_factory=dict)

    def chained(self, collective: Collective, group: str) -> Collective:
        """The same collective, which starts when those of other groups have ended."""
        return _Chained(collective, group, self)

    def start(
        self, group: str, launch: Callable[[], tuple[torch.Tensor, Work | None]]
    ) -> tuple[torch.Tensor, Work | None]:
        """Call ``launch`` for a group; returns its tensor and its work."""
        others = [work for name, work in self.last.items() if name != group]
        out, work = _after(others, launch)
        if others:
            self.last = {}  # they have ended
        if work is not None:
            self.last[group] = work
        return out, work


@dataclass(frozen=True)
class _Chained:
    collective: Collective
    group: str
    link: Link

    def typed(self) -> spmd.Collective:
        return self.collective.typed()

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        return self.link.start(self.group, lambda: self.collective.launch(x))

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        return self.link.start(self.group, lambda: self.collective.launch_reverse(grad))


def _after(
    others: list[Work], launch: Callable[[], tuple[torch.Tensor, Work | None]]
) -> tuple[torch.Tensor, Work | None]:
    """Launch when other works have ended; on devices with streams, computations do not wait."""
    here: Any = device.current()
    if not others or not here.has("streams"):
        for work in others:
            work.wait()
        return launch()
    side, before = here.stream(), here.current_stream()
    side.wait_stream(before)  # the input is ready
    with here.use_stream(side):
        for work in others:
            work.wait()
        out, started = launch()
    if out.device.type != "cpu":
        out.record_stream(before)
    return out, started
