"""What a planned job starts: our trainer or a script of Megatron-LM, with which words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
    install_adaptor()
    from mindspeed.planner.scripts import job_of

    return job_of(flags)


def program(flags: Sequence[str]) -> tuple[str, ...]:
    """Words between ``torch.distributed.run`` and the flags of a job."""
    if is_script(flags):
        return (str(Path(flags[0]).resolve()),)
    return ("-m", "mindspeed", "pretrain")


def command(flags: Sequence[str], candidate: Sequence[str], launch: str | None) -> str:
    """A command line to copy.

    Args:
        flags: of the job as the user gave them.
        candidate: flags of the candidate.
        launch: words of torchrun; None: without it.
    """
    words = list(candidate)
    if launch is not None:
        return shlex.join(["torchrun", *launch.split(), *program(flags), *words])
    if is_script(flags):
        return shlex.join(["python", *program(flags), *words])
    return shlex.join(["mindspeed", "pretrain", *words])
