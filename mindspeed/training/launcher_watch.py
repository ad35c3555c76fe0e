"""A rank ends when its launcher is gone, also after kill -9 of the launcher.

On Linux the kernel ends the rank (``PR_SET_PDEATHSIG``); elsewhere, and where the kernel was asked
too late, a thread notices that the parent has changed. This holds for launchers that run as long
as the job: ours, and torchrun. A shell that starts ranks in the background may end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mindspeed.processes import die_with_parent

LAUNCHER = "MINDSPEED_LAUNCHER_PID"


def launcher_of(environment: Mapping[str, str]) -> int | None:
    """Process id of the launcher of this rank; None if none runs as long as the job."""
    given = environment.get(LAUNCHER, "")
    if given.isdigit() and (int(given) == os.getppid() or not _exists(int(given))):
        return int(given)  # of a parent, not of an ancestor: a rank may start programs
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None


def end_with(launcher: int) -> None:
    """Let the kernel end this process when ``launcher``, its parent, ends."""
    die_with_parent()
    if is_gone(launcher):
        os._exit(1)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_gone(launcher: int) -> bool:
    """Whether ``launcher`` is no longer the parent of this process."""
    return os.getppid() != launcher
