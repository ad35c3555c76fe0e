"""Tiny runs that are executed once and timed for any device, precision and network.

    runs = ReplayedRuns(RecordedRuns("run/recordings", job), rates)
    signature = measure(job, layout, cluster, runs=runs)

What the planner executes does not depend on the cluster. A recording has the operators, messages
and waits of a tiny run in their order; to replay it takes milliseconds. A
recording is named by the flags of its run, not by the code: start with an empty directory after a
change of what is executed.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed.errors import PlanError
from mindspeed.files import atomic_write_bytes
from mindspeed.instruments.clock import Call, TimedCall, VirtualClock
from mindspeed.instruments.ledger import Communication
from mindspeed.planner import isolated
from mindspeed.planner.cluster.operations import Kernels, Operation
from mindspeed.planner.cluster.rates import DeviceRates
from mindspeed.planner.composed.tiny_run import Observation, Point, TinyRun, figures, observe
from mindspeed.planner.job import Job

MARK = None
"""An event that stands for a boundary of a segment."""


@dataclass(frozen=True)
class Recording:
    """A tiny run.

    Attributes:
        observed: the step; the times of its segments are those of no cluster.
        events: in their order, as numbers of things: an operation takes time, a communication
            starts, its second number is waited for, :data:`MARK` is a boundary of a segment.
        things: operations, communications, and for each wait the number of its communication's
            event.
    """

    observed: Observation
    events: list[int | None]
    things: list[Operation | tuple[str, Communication] | int]


class _NoTime:
    """Rates of an infinitely fast device that notes what it is asked."""

    slowdown = 1.0

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
    """Notes what happens."""

    def start(self) -> None:
        self.events: list[int | None] = []
        self.things: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._event_of: dict[int, int] = {}
        self._rates = _NoTime(self.add)
        self._counts_bytes = True

    def add(self, thing: Any) -> None:
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
        super()._wait(interval)


class _Marks:
    """Tells the times of segments by noting that they were asked for."""

    def __init__(self, clock: _RecordingClock) -> None:
        self._clock = clock

    @property
    def now(self) -> float:
        self._clock.events.append(MARK)
        return 0.0


def record(job: Job, point: Point) -> Recording:
    """Execute a tiny run; changes the state of this process."""
    clock = _RecordingClock(1.0, None)  # type: ignore[arg-type]
    clock.start()
    observed = observe(job, point, clock, _Marks(clock))
    return Recording(observed, clock.events, clock.things)


def replay(recording: Recording, rates: DeviceRates) -> TinyRun:
    """The figures of a run with the times of rates."""
    clock = VirtualClock.of(rates)
    seconds: dict[int, float] = {}
    started: dict[int, TimedCall] = {}
    times: list[float] = []
    for index, number in enumerate(recording.events):
        if number is MARK:
            times.append(clock.now)
            continue
        thing = recording.things[number]
        if isinstance(thing, Operation):
            if number not in seconds:
                seconds[number] = rates.seconds(thing)
            clock.now = clock._end(rates.queued(thing, seconds[number]))
        elif isinstance(thing, int):
            clock._wait(started[thing])
        else:
            started[index] = clock._communicate(*thing)
    observed = recording.observed
    segments = tuple(
        replace(one, start=times[2 * i], end=times[2 * i + 1])
        for i, one in enumerate(observed.segments)
    )
    return figures(replace(observed, segments=segments), clock)


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

    def recording(self, point: Point) -> Recording:
        """The recording of a point."""
        what = repr([self._job.argv, sorted(point.overrides.items()), point.devices, point.stage])
        path = self._directory / f"{digest(what)}.pickle"
        if not path.exists():
            if self._only_recorded:
                raise PlanError("not recorded")
            atomic_write_bytes(path, pickle.dumps(isolated.call(record, self._job, point)))
        return _load(path)


def digest(text: str) -> str:
    """A name for a file of what a text describes."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@cache
def _load(path: Path) -> Recording:
    found: Recording = pickle.loads(path.read_bytes())
    return found


class ReplayedRuns:
    """Recorded runs with the times of rates, as a cache of :func:`measure`.

    Args:
        runs: recordings.
        rates: makes the rates of a replay.
    """

    def __init__(self, runs: RecordedRuns, rates: Callable[[], DeviceRates]) -> None:
        self._runs, self._rates = runs, rates

    def get(self, point: Point) -> TinyRun:
        """The run of a point."""
        return replay(self._runs.recording(point), self._rates())

    def put(self, point: Point, run: TinyRun) -> None:
        """Nothing is to keep."""
