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
        launch: words of torchrun (:func:`launch_words`); None: one process.
    """
    words = list(candidate)
    own = any(word.partition("=")[0] in ("--nproc", "--devices") for word in words)
    if launch is None or (own and not is_script(flags)):
        start = ["python", *program(flags)] if is_script(flags) else ["mindspeed", "pretrain"]
        return shlex.join([*start, *words])
    here = launch.split()
    if len(here) == 1 and here[0].startswith(_ON_A_NODE) and not is_script(flags):
        return shlex.join(["mindspeed", "pretrain", *words, "--nproc", here[0][len(_ON_A_NODE) :]])
    return shlex.join(["torchrun", *here, *program(flags), *words])


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

    node = load_cluster(cluster).levels[0].size or devices
    if devices <= node:
        return f"{_ON_A_NODE}{devices}"
    if devices % node:
        return None
    return f"--nnodes={devices // node} {_ON_A_NODE}{node}"
