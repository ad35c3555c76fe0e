"""Run planning commands: the job to plan, their progress bar, and SIGTERM like Ctrl-C.

with interruptible() as stop, progress("counting") as tell:
    found = search(...)            # KeyboardInterrupt at either signal
return stop.status if found.interrupted else 0
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mindspeed.processes import imports_of_command

if TYPE_CHECKING:
    from mindspeed.planner.job import Job


def is_script(flags: Sequence[str]) -> bool:
    """Whether a job is ``SCRIPT FLAGS``."""
    return bool(flags) and not flags[0].startswith("-")


def install_adaptor() -> None:
    """Before anything of Megatron is imported."""
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401


def job_of(flags: Sequence[str]) -> Job:
    """The job of a command line.

    Raises:
        ConfigError: the script is none of Megatron-LM.
    """
    with imports_of_command():
        install_adaptor()
        from mindspeed.planner.scripts import job_of

    return job_of(flags)


def program(flags: Sequence[str], trains: str = "pretrain") -> tuple[str, ...]:
    """Words between ``torch.distributed.run`` and the flags of a job."""
    if is_script(flags):
        return (str(Path(flags[0]).resolve()),)
    return ("-m", "mindspeed", trains)


def command(
    flags: Sequence[str], candidate: Sequence[str], launch: str | None, trains: str = "pretrain"
) -> str:
    """A command line to copy.

    Args:
        flags: of the job as the user gave them.
        candidate: flags of the candidate.
        launch: words of torchrun (:func:`launch_words`); None: one process.
        trains: sub-command that trains.
    """
    words = list(candidate)
    own = any(word.partition("=")[0] in ("--nproc", "--devices") for word in words)
    if launch is None or (own and not is_script(flags)):
        start = ["python", *program(flags)] if is_script(flags) else ["mindspeed", trains]
        return shlex.join([*start, *words])
    here = launch.split()
    if len(here) == 1 and here[0].startswith(_ON_A_NODE) and not is_script(flags):
        return shlex.join(["mindspeed", trains, *words, "--nproc", here[0][len(_ON_A_NODE) :]])
    return shlex.join(["torchrun", *here, *program(flags, trains), *words])


_ON_A_NODE = "--nproc-per-node="


def launch_words(given: str | None, cluster: str | None, devices: int) -> str | None:
    """Words of torchrun for a job on whole nodes of a cluster.

    Args:
        given: by the user; they win.
        cluster: name or file; its innermost level is a node.
        devices: ranks of the job.
    """
    if given is not None or devices == 1 or cluster is None:
        return given
    from mindspeed.planner.cluster import load_cluster

    machine = load_cluster(cluster)
    if machine.node_size is None and len(machine.kinds) > 1:  # of different sizes
        return None
    node = machine.node_size or devices
    if devices <= node:
        return f"{_ON_A_NODE}{devices}"
    if devices % node:
        return None
    return f"--nnodes={devices // node} {_ON_A_NODE}{node}"


CTRL_C, TERMINATED = 130, 143
"""Exit statuses."""


@dataclass
class Stop:
    """Signal that ended a plan.

    Attributes:
        status: exit status of the command if it was.
    """

    status: int = CTRL_C


@contextmanager
def interruptible() -> Iterator[Stop]:
    """SIGTERM raises KeyboardInterrupt, once; further ones wait for the result to be printed.

    Raises:
        SystemExit: SIGTERM came before there was a result.
    """
    stop = Stop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        first, stop.status = stop.status != TERMINATED, TERMINATED
        if first:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield stop
        return
    try:
        yield stop
    except KeyboardInterrupt:
        if stop.status == TERMINATED:
            print("interrupted: nothing was found until then", file=sys.stderr)
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that is told how many parts are done, and how many there are."""
    with named_progress() as tell:
        yield lambda done, of: tell(title, done, of)


@contextmanager
def named_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that is told what is done, how much of it, and how much there is."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
