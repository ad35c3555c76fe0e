"""Candidates of a plan, measured: each is started for a few steps, and the others are ranked anew.

    found = measure(candidates, run, node_size=8)       # the most promising first, until it is sure
    found = measure(candidates, run, node_size=8, all_of_them=True)
    found.best, found.table(), found.to_json()

``run(number, candidate)`` returns the seconds of a step; :class:`Launcher` starts one with
``torch.distributed.run`` on this machine. Measured seconds correct the predictions of the other
candidates (:mod:`.correction`). The next one is that which can still be fastest; it ends when none
of them can be faster than the fastest measured one.
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
"""Seconds for one candidate, its start included."""
GRACE = 40.0
"""Seconds in which torchrun ends its ranks: after 30 it kills them."""
_SECONDS = re.compile(r"(?:elapsed time per iteration \(ms\)|ms/iteration): +([0-9.]+)")
_LAST_LINES = 5

OF_A_MEASUREMENT: dict[str, Any] = {
    "train_iters": STEPS,
    "train_samples": None,
    "train_tokens": None,
    "log_interval": 1,
    "eval_iters": 0,
    "eval_interval": 1000,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": None,
    "lr_warmup_samples": None,
    "lr_warmup_fraction": None,
    "rampup_batch_size": None,
    "exit_interval": None,
    "exit_duration_in_mins": None,
    "tensorboard_dir": None,
    "save": None,
    "save_interval": None,
    "load": None,
    "dry_run": None,
}
"""Overrides with which a job runs for a measurement."""

Run = Callable[[int, Any], float]


@dataclass(frozen=True)
class Measured:
    """One candidate that was started.

    Attributes:
        number: in the plan, from 1.
        candidate: as the plan has it.
        seconds: of a step; None: it failed.
        predicted: seconds that the corrected model expected.
        error: why it failed.
    """

    number: int
    candidate: Any
    seconds: float | None
    predicted: float
    error: str = ""


@dataclass(frozen=True)
class Measurements:
    """Measured candidates, in the order of the runs.

    Attributes:
        runs: the candidates that were started.
        factors: of the model, after all of them; None: no run succeeded.
        left: numbers of those that were not started and their corrected seconds, fastest first.
        interrupted: ended by Ctrl-C; those left may be faster.
    """

    runs: tuple[Measured, ...]
    factors: Factors | None
    left: tuple[tuple[int, float], ...] = ()
    interrupted: bool = False

    @property
    def best(self) -> Measured:
        """The fastest.

        Raises:
            PlanError: none ran.
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
        """Figures by name."""
        return {
            "runs": [
                {
                    "number": run.number,
                    "seconds": run.seconds,
                    "expected_seconds": run.predicted,
                    "error": run.error,
                }
                for run in self.runs
            ],
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
    tell: Callable[[Measured], None] = lambda measured: None,
) -> Measurements:
    """Measure candidates, those that can be the fastest first.

    Args:
        candidates: of a plan, with ``layout`` and ``prediction``.
        run: seconds of a step of a candidate; raises MindSpeedError if it fails.
        node_size: devices of a node.
        all_of_them: also those that cannot be the fastest.
        tell: callback with each result.
    """
    parts = {
        number: Parts.of(one.prediction, one.layout, node_size)
        for number, one in enumerate(candidates, start=1)
    }
    waiting, runs, interrupted = dict(parts), list[Measured](), False
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
            runs.append(Measured(number, candidate, None, expected, str(error)))
        else:
            runs.append(Measured(number, candidate, seconds, expected))
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
    """Starts jobs with ``torch.distributed.run`` on this machine, one after the other.

    Nothing listens on other interfaces than the loopback.

    Attributes:
        program: words before the flags, such as ``-m mindspeed pretrain``.
        ranks: processes.
        directory: of their output.
        environment: further variables.
    """

    program: tuple[str, ...]
    ranks: int
    directory: Path
    environment: Mapping[str, str]

    def seconds(self, name: str, flags: Sequence[str], timeout: float = TIMEOUT) -> float:
        """Run a job; the median seconds of its steps after the first ones.

        Args:
            name: of the file with its output.
            flags: of the job; it logs each step.
            timeout: seconds until it is killed.

        Raises:
            PlanError: it failed, with its last lines.
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
    """Let torchrun end its ranks, which are in sessions of their own; kill it if it does not."""
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
