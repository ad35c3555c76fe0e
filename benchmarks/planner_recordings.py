"""Recordings that are executed once and timed for any device, precision and network.

    runs = ReplayedRuns(RecordedRuns("run/recordings", job), rates)
    traces = Tracer(job, cluster, cache=runs).alike(layout, shape)

What the planner executes does not depend on the cluster. A recording has the operators, messages
and waits of a run in their order; to replay it takes milliseconds. It is
named by the flags of its run, not by the code: start with an empty directory after a
change of what is executed.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from mindspeed.errors import PlanError
from mindspeed.files import atomic_write_bytes
from mindspeed.instruments.clock import Call, TimedCall, VirtualClock
from mindspeed.instruments.ledger import Communication
from mindspeed.planner import isolated
from mindspeed.planner.cluster.operations import Kernels, Operation
from mindspeed.planner.cluster.rates import DeviceRates
from mindspeed.planner.count.recorder import add_routed, assign, record_point
from mindspeed.planner.count.recording import Block, Point, Recording, Sent
from mindspeed.planner.job import Job


@dataclass(frozen=True)
class RecordedRun:
    """A run.

    Attributes:
        recording: its blocks; in place of seconds they have the number of their events.
        events: in their order, as numbers of things: an operation takes time, a communication
            starts, its second number is waited for.
        things: operations, communications, and for each wait the number of its communication's
            event.
    """

    recording: Recording
    events: list[int]
    things: list[Operation | tuple[str, Communication] | int]


class _NoTime:
    """Rates of an infinitely fast device that notes what it is asked."""

    slowdown, routed = 1.0, 0.0

    def __init__(self, note: Callable[[Any], None]) -> None:
        self._note, self._kernels = note, Kernels()

    def operator(self, call: Call) -> float:
        self._note(self._kernels.operation(call))
        return 0.0

    def communication(self, communication: Communication) -> float:
        self._kernels.end()
        return 1.0  # so that every wait is seen

    def stream(self, communication: Communication) -> str:
        return ""


class _RecordingClock(VirtualClock):
    """Notes what happens; its time is the number of events."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.things: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._event_of: dict[int, int] = {}
        super().__init__(1.0, None)  # type: ignore[arg-type]
        self._rates = _NoTime(self.add)
        self.counts_bytes = True

    @property
    def now(self) -> float:  # type: ignore[override]
        """Events so far."""
        return float(len(self.events))

    @now.setter
    def now(self, value: float) -> None:
        """Time does not pass otherwise."""

    def add(self, thing: Any) -> None:
        """Note an event."""
        if thing not in self._numbers:
            self._numbers[thing] = len(self.things)
            self.things.append(thing)
        self.events.append(self._numbers[thing])

    def _communicate(self, name: str, communication: Communication) -> TimedCall:
        interval = super()._communicate(name, communication)
        self._event_of[id(interval)] = len(self.events)
        self.add((name, communication))
        return interval

    def _wait(self, interval: TimedCall) -> None:
        self.add(self._event_of[id(interval)])


def record(job: Job, point: Point) -> RecordedRun:
    """Execute a run; changes the state of this process."""
    clock = _RecordingClock()
    args = job.settings(point.overrides, point.devices).args
    found = record_point(args, point, clock)
    return RecordedRun(found, clock.events, clock.things)


def replay(run: RecordedRun, rates: DeviceRates) -> Recording:
    """The recording of a run with the times of rates."""
    clock = VirtualClock.of(rates)
    seconds: dict[int, float] = {}
    started: dict[int, TimedCall] = {}
    times, routed = [0.0], [0.0]
    for index, number in enumerate(run.events):
        thing = run.things[number]
        if isinstance(thing, Operation):
            if number not in seconds:
                seconds[number] = rates.seconds(thing)
            clock.now = clock._end(rates.queued(thing, seconds[number]))
        elif isinstance(thing, int):
            clock._wait(started[thing])
        else:
            started[index] = clock._communicate(*thing)
        times.append(clock.now)
        routed.append(rates.routed)
    ends = [round(one) for one in accumulate(block.seconds for block in run.recording.blocks)]
    first = (0, *ends[:-1])
    starts = [times[at] for at in first]
    blocks = tuple(
        replace(block, seconds=times[end] - start, sent=_messages(block))
        for block, start, end in zip(run.recording.blocks, starts, ends, strict=True)
    )
    for block, begin, end in zip(blocks, first, ends, strict=True):
        add_routed(block, routed[end] - routed[begin])
    assign(clock, blocks, starts)
    return replace(run.recording, blocks=blocks)


def _messages(block: Block) -> Sent:
    """What a block sends, without the waits."""
    return {message: traffic for message, traffic in block.sent.items() if message.op}


class RecordedRuns:
    """Known runs of a job; those that are not known are recorded.

    Args:
        directory: of recordings.
        job: whose runs they are.
        only_recorded: a run without a recording is an error.
    """

    def __init__(self, directory: str | Path, job: Job, only_recorded: bool = False) -> None:
        self._directory, self._job, self._only_recorded = Path(directory), job, only_recorded
        self._directory.mkdir(parents=True, exist_ok=True)

    def run(self, point: Point) -> RecordedRun:
        """The run of a point."""
        path = self._directory / f"{name_of(self._job, point)}.pickle"
        if not path.exists():
            if self._only_recorded:
                raise PlanError("not recorded")
            atomic_write_bytes(path, pickle.dumps(isolated.call(record, self._job, point)))
        return _load(path)


def name_of(job: Job, point: Point) -> str:
    """A name for the run of a point: flags that it removes count if the job has them."""
    flags = point.overrides.items()
    changed = sorted((name, x) for name, x in flags if x is not None or job.gives(name))
    where = [point.devices, point.stage, point.forward, point.bare]
    return digest(repr([job.argv, changed, *where]))


def digest(text: str) -> str:
    """A name for a file of what a text describes."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@cache
def _load(path: Path) -> RecordedRun:
    found: RecordedRun = pickle.loads(path.read_bytes())
    return found


class ReplayedRuns:
    """Recorded runs with the times of rates, as a cache of recordings.

    Args:
        runs: recordings.
        rates: makes the rates of a replay.
    """

    def __init__(self, runs: RecordedRuns, rates: Callable[[], DeviceRates]) -> None:
        self._runs, self._rates = runs, rates

    def get(self, point: Point) -> Recording:
        """The recording of a point."""
        return replay(self._runs.run(point), self._rates())

    def put(self, point: Point, recording: Recording) -> None:
        """Nothing is to keep."""
