"""Features that measure a job in its first steps, run on FakeTensors instead.

They wrap the function that runs the micro-batches of a step (seam ``schedule``). Here the same
wrapper runs with other instruments: bytes are counted, seconds are those of a model of time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mindspeed import session
from mindspeed.device import Device
from mindspeed.device.base import MemoryStats
from mindspeed.errors import ConfigError
from mindspeed.instruments.clock import VirtualClock
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.journal import Journal
from mindspeed.memory.estimate import Clock
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.fake_world import fake_world
from mindspeed.planner.rates import DeviceRates
from mindspeed.planner.values import PlannedTensors

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class CountedDevice:
    """A device whose memory holds what was counted; all else is that of ``device``.

    Args:
        device: of this process.
        memory: counts.
    """

    def __init__(self, device: Device, memory: LiveMemory) -> None:
        self._device, self._memory = device, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def reset_peak_memory(self) -> None:
        """The peak is what is alive now."""
        self._memory.restart()

    def memory_stats(self) -> MemoryStats:
        """Bytes of tensors."""
        stats = self._device.memory_stats()
        return replace(stats, allocated=self._memory.total, peak=self._memory.peak)


def modelled_clock(cluster: Cluster) -> Clock:
    """Seconds of a function by the model of time."""

    def seconds(run: Callable[[], object]) -> float:
        with VirtualClock.of(DeviceRates(cluster)) as clock:
            run()
        return clock.now

    return seconds


@contextlib.contextmanager
def fake_rank(args: argparse.Namespace, rank: int) -> Iterator[argparse.Namespace]:
    """A rank of the job in this process; yields its arguments.

    Args:
        args: final values, of a dry run.
        rank: global rank.
    """
    args = copy.copy(args)
    with fake_world(args, rank), PlannedTensors():
        yield args


def wrapper_of(feature: str, flag: str) -> Wrapper:
    """What a feature wraps the schedule with.

    Raises:
        ConfigError: the feature is off.
    """
    for owner, function in session.install().seams.schedule.functions:
        if owner == feature:
            return function
    raise ConfigError(f"{flag} measures nothing in this job: it is off, or has its result already")


@contextlib.contextmanager
def wrapped_by(feature: str, wrapper: Wrapper) -> Iterator[None]:
    """The schedule is wrapped with ``wrapper`` in place of the feature's own."""
    seam, journal = session.install().seams.schedule, Journal()
    changed = [
        (owner, wrapper if owner == feature else function) for owner, function in seam.functions
    ]
    journal.set(seam, "functions", changed, owner="planner")
    try:
        yield
    finally:
        journal.undo()
