"""Collectives of two groups on one link start one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed.moe.collectives import BusyLink


@dataclass
class Work:
    name: str
    log: list[str]

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


@dataclass
class Named:
    name: str
    log: list[str]

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, Work]:
        self.log.append(f"start {self.name}")
        return x, Work(self.name, self.log)

    launch_reverse = launch


def test_groups_take_turns():
    log: list[str] = []
    link, x = BusyLink(), torch.ones(1)
    for name, group in [("a1", "ep"), ("a2", "ep"), ("g1", "tp"), ("g2", "tp"), ("a3", "ep")]:
        collective = link.chained(Named(name, log), group)
        (collective.launch if name != "g2" else collective.launch_reverse)(x)
    # Of one group the last is waited for: it has ended when that has.
    assert log == [
        "start a1", "start a2", "wait a2", "start g1", "start g2", "wait g2", "start a3",
    ]  # fmt: skip


def test_a_collective_that_is_done_at_once_holds_nobody_up():
    link, x = BusyLink(), torch.ones(1)
    assert link.start("ep", lambda: (x, None)) == (x, None)
    assert link.start("tp", lambda: (x, None)) == (x, None)
