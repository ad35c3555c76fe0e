"""Start a training script with ``--auto-tuning``: it plans its own parallel configuration and ends.

    torchrun pretrain_gpt.py FLAGS --auto-tuning --auto-tuning-ranks 64
    torchrun pretrain_gpt.py FLAGS --auto-settings --auto-settings-type mixed --nproc-per-node 8
    torchrun pretrain_gpt.py FLAGS --auto-parallel --nnodes 4 --nproc-per-node 8

Rank 0 starts ``mindspeed plan`` (:mod:`mindspeed.planner`) with the same command line in a process
of its own, prints what it finds, and the job ends; nothing is trained, loaded or saved. A plan
needs no device: one process on any machine does, and any number of devices can be planned for.

The three switches differ in their names, the defaults of the original, and what is searched:
``--auto-parallel`` chooses among pipeline, tensor, data and context parallelism and sizes of
micro-batches, the others among everything the planner knows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mindspeed import device
from mindspeed.errors import DEBUG
from mindspeed.features.compatibility.own_process import (
    outside_of_job,
    run_with_signals,
    without_options,
    words_of_job,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import MAX_RANKS, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


_RANKS, _PORTS = Range(1, MAX_RANKS), Range(1, 65535)


# Options and the switches with which they have an effect.
_BELONG_TO: dict[str, tuple[str, ...]] = {
    "auto_tuning_work_dir": ("auto_tuning",),
    "auto_tuning_ranks": ("auto_tuning",),
    "auto_tuning_log_level": ("auto_tuning",),
    "auto_settings_type": ("auto_settings",),
    "auto_settings_work_dir": ("auto_settings",),
    "auto_settings_ranks": ("auto_settings",),
    "auto_settings_log_level": ("auto_settings",),
    "target_nnodes": ("auto_settings",),
    "simulated_nnodes": ("auto_parallel",),
    "simulated_nproc_per_node": ("auto_parallel",),
    "prof_file": ("auto_tuning", "auto_settings", "auto_parallel"),
    "nnodes": ("auto_tuning", "auto_settings", "auto_parallel"),
    "nproc_per_node": ("auto_tuning", "auto_settings", "auto_parallel"),
    "node_rank": ("auto_tuning", "auto_settings", "auto_parallel"),
    "master_addr": ("auto_tuning", "auto_settings", "auto_parallel"),
    "master_port": ("auto_tuning", "auto_settings", "auto_parallel"),
}
_OF_LAUNCHERS = {"nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port"}

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

_PLANNING = "MINDSPEED_PLANNING"
"""Set in the process that plans, which reads the same flags again."""


class AutoTuning(
    Feature,
    level=2,
    planning=("no part",),
):
    """A training script plans its parallel configuration in place of training."""

    auto_tuning: bool = flag(False, "plan the parallel configuration instead of training")
    auto_tuning_work_dir: str | None = flag(None, "directory of the plan; None: ./auto_tuning_dir")
    auto_tuning_ranks: int | None = flag(None, "devices to plan for; None: 16", range=_RANKS)
    auto_tuning_log_level: Literal["debug", "info", "warning"] | None = flag(
        None, "what is printed: warning the result, info progress too, debug tracebacks too"
    )
    auto_settings: bool = flag(False, "the same as --auto-tuning")
    auto_settings_type: Literal["white", "black", "mixed"] | None = flag(
        None, "white plans, mixed also measures the best, black measures all that fit; None: white"
    )
    auto_settings_work_dir: str | None = flag(None, "directory of the plan; None: this one")
    auto_settings_ranks: int | None = flag(None, "devices to plan for; None: 16", range=_RANKS)
    auto_settings_log_level: Literal["debug", "info", "warning"] | None = flag(
        None, "as --auto-tuning-log-level"
    )
    target_nnodes: int | None = flag(
        None, "with --auto-settings: nodes to plan for, of --nproc-per-node devices", range=_RANKS
    )
    prof_file: str | None = flag(
        None, "figures of the cluster, as mindspeed calibrate writes them; None: a preset"
    )
    auto_parallel: bool = flag(
        False, "plan pipeline, tensor, data and context parallelism and micro-batches"
    )
    nnodes: int | None = flag(
        None, "nodes that the planned job starts on", aliases=["--nodes"], range=_RANKS
    )
    nproc_per_node: int | None = flag(None, "devices of a node", range=_RANKS)
    node_rank: int | None = flag(
        None, "number of this node; node 0 plans", range=Range(0, MAX_RANKS)
    )
    master_addr: str | None = flag(None, "address in the commands that the plan prints")
    master_port: int | None = flag(None, "port in the commands that the plan prints", range=_PORTS)
    simulated_nnodes: int | None = flag(
        None, "with --auto-parallel: nodes to plan for in place of --nnodes", range=_RANKS
    )
    simulated_nproc_per_node: int | None = flag(
        None, "with --auto-parallel: devices of these nodes", range=_RANKS
    )

    @property
    def switches(self) -> tuple[str, ...]:
        names = ("auto_tuning", "auto_settings", "auto_parallel")
        return tuple(name for name in names if getattr(self, name))

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        for name, owners in _BELONG_TO.items():
            if getattr(self, name) is not None and not set(owners) & set(self.switches):
                fix = f"add {' or '.join(map(_spelling, owners))}, or remove it"
                if name in _OF_LAUNCHERS:
                    fix = f"give it to torchrun, before the script, or {fix}"
                yield Problem(_spelling(name), "has no effect alone", fix)
        if len(self.switches) > 1:
            first, *others = map(_spelling, self.switches)
            yield Problem(first, f"is another name for {', '.join(others)}", "give one of them")
        if not self.switches:
            return
        for name in ("master_addr", "master_port", "node_rank"):
            if getattr(self, name) is not None and self.nnodes is None:
                yield Problem(_spelling(name), "has no effect on one node", "give --nnodes, too")
        if self.node_rank is not None and self.node_rank >= (self.nnodes or MAX_RANKS):
            yield Problem(
                "--node-rank", f"is {self.node_rank}", f"nodes are 0 to {(self.nnodes or 1) - 1}"
            )
        yield from self._problems_of_devices()

    def _problems_of_devices(self) -> Iterator[Problem]:
        if (self.simulated_nnodes is None) != (self.simulated_nproc_per_node is None):
            yield Problem("--simulated-nnodes", "needs --simulated-nproc-per-node, and the reverse")
        if self.nnodes is not None and self.nproc_per_node is None:
            yield Problem("--nnodes", "has no effect without --nproc-per-node", "give both")
            return
        if self.target_nnodes is not None and self.nproc_per_node is None:
            yield Problem("--target-nnodes", "counts nodes", "give --nproc-per-node, too")
            return
        if self.auto_parallel and self.nproc_per_node is None and not self.simulated_nnodes:
            yield Problem("--auto-parallel", "has no devices", "give --nnodes and --nproc-per-node")
        if self.target_nnodes is not None and self.auto_settings_ranks is not None:
            yield Problem(
                "--target-nnodes", "and --auto-settings-ranks both say how many", "give one"
            )
        if self.auto_settings_type in ("mixed", "black"):
            kind = f"--auto-settings-type {self.auto_settings_type}"
            if (self.nnodes or 1) > 1:
                yield Problem(kind, "measures on one node", "plan with white for several nodes")
            elif self.nproc_per_node is None:
                yield Problem(kind, "starts ranks here", "give --nproc-per-node")
            elif self.device_count() != self.nproc_per_node:
                yield Problem(
                    kind,
                    f"plans for {self.device_count()} devices and measures on "
                    f"{self.nproc_per_node}",
                    f"give --auto-settings-ranks {self.nproc_per_node}",
                )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        self.plan_and_end(megatron)

    def device_count(self) -> int:
        """Number of devices to plan for."""
        if self.simulated_nnodes and self.simulated_nproc_per_node:
            return self.simulated_nnodes * self.simulated_nproc_per_node
        if self.target_nnodes:
            return self.target_nnodes * (self.nproc_per_node or 1)
        given = self.auto_tuning_ranks or self.auto_settings_ranks
        if given is None and self.nproc_per_node is not None:
            return (self.nnodes or 1) * self.nproc_per_node
        return given or DEVICES

    def plan_and_end(self, megatron: Mapping[str, Any]) -> None:
        """Plan on rank 0 of node 0, and end this process; a no-op in the process that plans.

        Raises:
            SystemExit: with the status of the plan on the rank that plans, else 0.
        """
        if os.environ.get(_PLANNING):
            return
        if int(os.environ.get("RANK", "0")) > 0 or (self.node_rank or 0) > 0:
            raise SystemExit(0)
        for name in ("load", "save"):
            if megatron.get(name):
                print(f"--{name} is ignored: nothing is trained while planning", file=sys.stderr)
        words = self.plan_command(words_of_job(megatron), _device_name())
        level = self.auto_tuning_log_level or self.auto_settings_log_level or "info"
        environment = _environment(level)
        status, errors = run_with_signals(words, environment, quiet=level == "warning")
        if status and errors:
            sys.stderr.buffer.write(errors)
        sys.stderr.flush()
        raise SystemExit(status)

    def plan_command(self, job: Sequence[str], device_name: str) -> list[str]:
        """The command line of the plan.

        Args:
            job: ``SCRIPT FLAGS`` of Megatron-LM, or flags of our trainer.
            device_name: name of this machine's devices.
        """
        preset = next((p for part, p in _PRESETS.items() if part in device_name), "generic")
        words = [sys.executable, "-m", "mindspeed", "plan"]
        words += ["--cluster", self.prof_file or preset, "--devices", str(self.device_count())]
        words += ["--out", self._work_dir()]
        if self.auto_parallel:
            words += ["--search", SEARCHED]
        if self.auto_settings_type in ("mixed", "black"):
            words += ["--measure", str(self.auto_settings_type)]
        if self.nproc_per_node is not None:
            words += ["--launch", self._launcher()]
        return [*words, "--", *without_options(job, type(self))]

    def _launcher(self) -> str:
        """Arguments of torchrun in the commands that the plan prints."""
        node = self.simulated_nproc_per_node or self.nproc_per_node or 1
        nodes = -(-self.device_count() // node)
        words = [f"--nnodes={nodes}", f"--nproc-per-node={min(node, self.device_count())}"]
        for name in ("node_rank", "master_addr", "master_port"):
            if getattr(self, name) is not None:
                words.append(f"--{name.replace('_', '-')}={getattr(self, name)}")
        return " ".join(words)

    def _work_dir(self) -> str:
        if self.auto_tuning:
            return self.auto_tuning_work_dir or "auto_tuning_dir"
        return self.auto_settings_work_dir or "."


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")


def _device_name() -> str:
    here = device.current()
    return "" if here.on_host else here.properties().name


def _environment(level: str) -> dict[str, str]:
    """Environment of the process that plans."""
    return {**outside_of_job(), _PLANNING: "1", **({DEBUG: "1"} if level == "debug" else {})}
