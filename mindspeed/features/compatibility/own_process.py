"""Run a command of this library about a job in a child process of one of its ranks.

The process gets the command line of the job and no variable of its launcher, so it is part of no
job; it needs no device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from mindspeed.features.feature import COMMAND_WORDS
from mindspeed.flags import flags_of
from mindspeed.processes import die_with_parent

_OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_A_LAUNCHER = ("TORCHELASTIC_", "MASTER_", "GROUP_WORLD_SIZE", "ROLE_")


def run_with_signals(
    words: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
) -> tuple[int, bytes]:
    """Run a command that receives SIGTERM and SIGINT of this process, and ends with it.

    Args:
        words: the command line.
        environment: all variables.
        quiet: keep its standard error.

    Returns:
        Exit status, 128 + N after a signal N, and what was kept.
    """
    errors = subprocess.PIPE if quiet else None
    end = partial(die_with_parent, signal.SIGTERM)
    process = subprocess.Popen(words, env=environment, stderr=errors, preexec_fn=end)

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:  # a terminal sends that to both
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        kept = process.communicate()[1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = process.returncode
    return (128 - status if status < 0 else status), kept or b""


def without_options(words: Sequence[str], options: type) -> list[str]:
    """Remove the flags of ``options`` and their values from a command line."""
    switches: set[str] = set()
    valued: set[str] = set()
    for item in flags_of(options):
        kinds = switches if item.type in (bool, "bool") else valued
        kinds.update((item.option, *item.aliases))
    kept = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip and not word.startswith("--"):
            skip = False
            continue
        skip = name in valued and not equals
        if name not in valued and name not in switches:
            kept.append(word)
    return kept


def words_of_job(megatron: Mapping[str, Any]) -> list[str]:
    """The command line of this job: that of our trainer, or of a script of Megatron-LM."""
    given = megatron.get(COMMAND_WORDS)
    if given is not None:
        return list(given)
    if sys.argv[0].endswith(("/mindspeed", "mindspeed/__main__.py")):
        return sys.argv[2:]  # after the name of a command
    return [os.path.abspath(sys.argv[0]), *sys.argv[1:]]


def outside_of_job() -> dict[str, str]:
    """The environment of a process outside of the job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_RANK and not name.startswith(_OF_A_LAUNCHER)
    }
