"""The process that ``--auto-tuning`` and its relatives start, and the end of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from mindspeed import device
from mindspeed.errors import DEBUG
from mindspeed.flags import flags_of
from mindspeed.processes import die_with_parent

if TYPE_CHECKING:
    from mindspeed.features.auto_tuning import AutoTuning

WORDS = "command_words"
"""Name in the arguments: the command line, where it is not that of the process."""

DEVICES = 16
SEARCHED = "tp,cp,cp_algorithm,pp,mbs"
"""Dimensions of ``--auto-parallel``."""

_PRESETS = {
    "910_93": "ascend-910-93",
    "910B": "ascend-910b",
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
}
"""Part of a device's name -> preset."""

_OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_A_LAUNCHER = ("TORCHELASTIC_", "MASTER_", "GROUP_WORLD_SIZE", "ROLE_")
_PLANNING = "MINDSPEED_PLANNING"
"""Set in the process that plans, which reads the same flags again."""


def devices(options: AutoTuning) -> int:
    """Devices to plan for."""
    if options.simulated_nnodes and options.simulated_nproc_per_node:
        return options.simulated_nnodes * options.simulated_nproc_per_node
    if options.target_nnodes:
        return options.target_nnodes * (options.nproc_per_node or 1)
    given = options.auto_tuning_ranks or options.auto_settings_ranks
    if given is None and options.nproc_per_node is not None:
        return (options.nnodes or 1) * options.nproc_per_node
    return given or DEVICES


def plan_and_end(options: AutoTuning, megatron: Mapping[str, Any]) -> None:
    """Plan on rank 0 of node 0, and end this process; in the process that plans do nothing.

    Raises:
        SystemExit: with the status of the plan on the rank that plans, else 0.
    """
    if os.environ.get(_PLANNING):
        return
    if int(os.environ.get("RANK", "0")) > 0 or (options.node_rank or 0) > 0:
        raise SystemExit(0)
    for name in ("load", "save"):
        if megatron.get(name):
            print(f"--{name} is ignored: nothing is trained while planning", file=sys.stderr)
    words = plan_command(options, _words_of_job(megatron), _device_name())
    level = options.auto_tuning_log_level or options.auto_settings_log_level or "info"
    environment = _environment(level)
    status, errors = run_with_signals(words, environment, quiet=level == "warning")
    if status and errors:
        sys.stderr.buffer.write(errors)
    sys.stderr.flush()
    raise SystemExit(status)


def run_with_signals(
    words: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
) -> tuple[int, bytes]:
    """Run a command that gets the SIGTERM and SIGINT of this process, and ends with it.

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


def plan_command(options: AutoTuning, job: Sequence[str], device_name: str) -> list[str]:
    """The command line of the plan.

    Args:
        options: what is asked for.
        job: ``SCRIPT FLAGS`` of Megatron-LM, or flags of our trainer.
        device_name: of this machine's devices.
    """
    preset = next((p for part, p in _PRESETS.items() if part in device_name), "generic")
    words = [sys.executable, "-m", "mindspeed", "plan"]
    words += ["--cluster", options.prof_file or preset, "--devices", str(devices(options))]
    words += ["--out", _work_dir(options)]
    if options.auto_parallel:
        words += ["--search", SEARCHED]
    if options.auto_settings_type in ("mixed", "black"):
        words += ["--measure", str(options.auto_settings_type)]
    if options.nproc_per_node is not None:
        words += ["--launch", _launcher(options)]
    return [*words, "--", *without_options(job, type(options))]


def _launcher(options: AutoTuning) -> str:
    """The words of torchrun in the commands that the plan prints."""
    node = options.simulated_nproc_per_node or options.nproc_per_node or 1
    nodes = -(-devices(options) // node)
    words = [f"--nnodes={nodes}", f"--nproc-per-node={min(node, devices(options))}"]
    for name in ("node_rank", "master_addr", "master_port"):
        if getattr(options, name) is not None:
            words.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    return " ".join(words)


def _work_dir(options: AutoTuning) -> str:
    if options.auto_tuning:
        return options.auto_tuning_work_dir or "auto_tuning_dir"
    return options.auto_settings_work_dir or "."


def without_options(words: Sequence[str], options: type) -> list[str]:
    """A command line without the flags of ``options`` and their values."""
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


def _words_of_job(megatron: Mapping[str, Any]) -> list[str]:
    """The command line of this job: that of our trainer, or of a script of Megatron-LM."""
    given = megatron.get(WORDS)
    if given is not None:
        return list(given)
    if sys.argv[0].endswith(("/mindspeed", "mindspeed/__main__.py")):
        return sys.argv[2:]  # behind the name of a command
    return [os.path.abspath(sys.argv[0]), *sys.argv[1:]]


def _device_name() -> str:
    here = device.current()
    return "" if here.on_host else here.properties().name


def _environment(level: str) -> dict[str, str]:
    """That of a process outside of the job."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_RANK and not name.startswith(_OF_A_LAUNCHER)
    }
    return {**kept, _PLANNING: "1", **({DEBUG: "1"} if level == "debug" else {})}
