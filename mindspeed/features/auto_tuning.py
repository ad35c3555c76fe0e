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

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from mindspeed.features._auto_tuning_command import devices, plan_and_end
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import MAX_RANKS, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_RANKS, _PORTS = Range(1, MAX_RANKS), Range(1, 65535)


class AutoTuning(Feature, level=2):
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
        """Names of the switches that are on."""
        names = ("auto_tuning", "auto_settings", "auto_parallel")
        return tuple(name for name in names if getattr(self, name))

    def problems(self, megatron: Megatron) -> list[Problem]:
        return list(self._problems())

    def _problems(self) -> Iterator[Problem]:
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
            elif devices(self) != self.nproc_per_node:
                yield Problem(
                    kind,
                    f"plans for {devices(self)} devices and measures on {self.nproc_per_node}",
                    f"give --auto-settings-ranks {self.nproc_per_node}",
                )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        plan_and_end(self, megatron)


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


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")


def asked(values: Megatron) -> bool:
    """Whether a command line asks for a plan in place of training."""
    return any(values.get(name) for name in ("auto_tuning", "auto_settings", "auto_parallel"))
