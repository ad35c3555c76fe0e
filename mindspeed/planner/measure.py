"""Measure candidates of a plan: run each for a few steps, and re-rank the others.

    found = measure(candidates, run, node_size=8)       # until no other can be faster
    found = measure(candidates, run, node_size=8, all_of_them=True)
    found.best, found.table(), found.to_json()

``run(number, candidate)`` returns the seconds of a step; :class:`Launcher` starts one with
``torch.distributed.run`` on this machine. Measured seconds correct the predictions of the other
candidates (:mod:`.correction`). The next candidate is the one with the lowest confidence bound; the
search ends when no bound is below the fastest measured candidate.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.files import make_dirs, secure_open
from mindspeed.planner.correction import Factors, Parts
from mindspeed.processes import die_with_parent, free_port

STEPS, WARM_UP = 8, 3
TIMEOUT = 1800.0
"""Seconds for one candidate, including its start."""
GRACE = 40.0
"""Seconds for torchrun to end its ranks, which it kills after 30."""
_SECONDS = re.compile(r"(?:elapsed time per iteration \(ms\)|ms/iteration): +([0-9.]+)")
_LAST_LINES = 5

_NOT_MEASURED = (
    *("train_samples", "train_tokens", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
    *("lr_warmup_samples", "lr_warmup_fraction", "rampup_batch_size", "exit_interval"),
    *("exit_duration_in_mins", "tensorboard_dir", "save", "save_interval", "load", "dry_run"),
)
_SHORT = {"train_iters": STEPS, "log_interval": 1, "eval_iters": 0, "eval_interval": 1000}
OF_A_MEASUREMENT: dict[str, Any] = {**dict.fromkeys(_NOT_MEASURED), **_SHORT}
"""Overrides of a job that runs for a measurement."""

Run = Callable[[int, Any], float]


@dataclass(frozen=True)
class MeasuredCandidate:
    """A candidate that was started.

    Attributes:
        number: its number in the plan, from 1.
        seconds: seconds of a step; None: it failed.
        predicted: seconds that the corrected model predicted.
    """

    number: int
    candidate: Any
    seconds: float | None
    predicted: float
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON."""
        seconds = {"seconds": self.seconds, "expected_seconds": self.predicted}
        return {"number": self.number, **seconds, "error": self.error}


@dataclass(frozen=True)
class Measurements:
    """Measured candidates, in the order of the runs.

    Attributes:
        runs: the candidates that were started.
        factors: correction of the model after all runs; None: no run succeeded.
        left: numbers and corrected seconds of candidates that were not started, fastest first.
        interrupted: whether Ctrl-C ended it; candidates that were not started may be faster.
    """

    runs: tuple[MeasuredCandidate, ...]
    factors: Factors | None
    left: tuple[tuple[int, float], ...] = ()
    interrupted: bool = False

    @property
    def best(self) -> MeasuredCandidate:
        """The fastest candidate.

        Raises:
            PlanError: no candidate succeeded.
        """
        ran = [run for run in self.runs if run.seconds is not None]
        if not ran:
            reasons = "\n".join(f"{run.number}: {run.error}" for run in self.runs)
            raise PlanError(f"none of the candidates ran\n{reasons}")
        return min(ran, key=lambda run: run.seconds or 0.0)

    def table(self) -> str:
        """Format the measurements as a table."""
        lines = [f"{'':>3} {'measured':>10} {'expected':>10}  layout"]
        for run in self.runs:
            seconds = "failed" if run.seconds is None else f"{run.seconds:.4g} s"
            where = f"{run.candidate.layout}  {run.error}".rstrip()
            lines.append(f"{run.number:>3} {seconds:>10} {run.predicted:>8.4g} s  {where}")
        if self.left:
            rest = ", ".join(f"{number} ({seconds:.4g} s)" for number, seconds in self.left)
            why = "interrupted" if self.interrupted else "cannot be faster"
            lines.append(f"not started, {why}: {rest}")
        if self.factors is not None:
            factors = self.factors.to_json().items()
            lines.append("factors: " + ", ".join(f"{name} {value:.3g}" for name, value in factors))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The measurements as JSON."""
        return {
            "runs": [one.to_json() for one in self.runs],
            "factors": None if self.factors is None else self.factors.to_json(),
            "interrupted": self.interrupted,
            "not_started": [{"number": n, "expected_seconds": s} for n, s in self.left],
        }


def measure(
    candidates: Sequence[Any],
    run: Run,
    *,
    node_size: int,
    all_of_them: bool = False,
    tell: Callable[[MeasuredCandidate], None] = lambda measured: None,
) -> Measurements:
    """Measure candidates, those that can be the fastest first.

    Args:
        candidates: candidates of a plan, with ``layout`` and ``prediction``.
        run: returns the seconds of a step of a candidate; raises MindSpeedError if it fails.
        all_of_them: also measure those that cannot be the fastest.
    """
    parts = {
        number: Parts.of(one.prediction, one.layout, node_size)
        for number, one in enumerate(candidates, start=1)
    }
    waiting, runs, interrupted = dict(parts), list[MeasuredCandidate](), False
    factors: Factors | None = None
    fastest = float("inf")
    while waiting:
        number = min(waiting, key=lambda n: (_optimistic(factors, waiting[n]), n))
        if not all_of_them and _optimistic(factors, waiting[number]) >= fastest:
            break
        here = waiting[number]
        expected = here.seconds if factors is None else factors.seconds(here)
        candidate = candidates[number - 1]
        try:
            seconds = run(number, candidate)
        except KeyboardInterrupt:
            interrupted = True
            break
        except MindSpeedError as error:
            runs.append(MeasuredCandidate(number, candidate, None, expected, str(error)))
        else:
            runs.append(MeasuredCandidate(number, candidate, seconds, expected))
            fastest = min(fastest, seconds)
            if factors is None:
                factors = Factors.first(here, seconds)
            else:
                factors = factors.updated(here, seconds)
        del waiting[number]
        tell(runs[-1])
    left = [(n, p.seconds if factors is None else factors.seconds(p)) for n, p in waiting.items()]
    return Measurements(
        tuple(runs), factors, tuple(sorted(left, key=lambda one: one[1])), interrupted
    )


def _optimistic(factors: Factors | None, parts: Parts) -> float:
    return parts.seconds if factors is None else factors.optimistic(parts)


@dataclass(frozen=True)
class Launcher:
    """Starts jobs with ``torch.distributed.run`` on this machine, on the loopback interface only.

    Attributes:
        program: words before the flags, such as ``-m mindspeed pretrain``.
        ranks: number of processes.
    """

    program: tuple[str, ...]
    ranks: int
    directory: Path
    environment: Mapping[str, str]

    def seconds(self, name: str, flags: Sequence[str], timeout: float = TIMEOUT) -> float:
        """Run a job; the median seconds of its steps without warm-up.

        Args:
            flags: flags of the job, with which it logs each step.

        Raises:
            PlanError: the job failed; has its last lines.
        """
        make_dirs(self.directory)
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}"]
        words += ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        path = self.directory / f"{name}.log"
        with secure_open(path, "w") as output:
            process = subprocess.Popen(
                [*words, *self.program, *flags],
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise PlanError(f"it did not end within {timeout:g} s; see {path}") from None
            finally:
                _end(process)
        return _seconds(path, status)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate torchrun, which ends its ranks in other sessions; kill it after :data:`GRACE`."""
    if process.poll() is not None:
        return
    try:
        process.terminate()
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _seconds(path: Path, status: int) -> float:
    text = path.read_text(errors="replace")
    found = [float(match) / 1000 for match in _SECONDS.findall(text)]
    if status or len(found) <= WARM_UP:
        lines = [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
        what = f"it ended with status {status}" if status else f"it logged {len(found)} steps"
        raise PlanError(f"{what}; see {path}, whose last lines are\n" + "\n".join(lines))
    return statistics.median(found[WARM_UP:])
