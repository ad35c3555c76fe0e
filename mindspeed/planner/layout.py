"""A candidate layout of a job, and tables of the flags of its named options.

    layout = Layout(devices=1024, global_batch_size=1024, tp=8, pp=8, mbs=1)
    job.settings(layout.overrides(), layout.devices)

A field that is None keeps the job's value. A flag whose value is None is removed from the job.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any

from mindspeed.features.registry import flags_planned_as, options, schedule_flags
from mindspeed.pipeline.placed_stages import V_SHAPES, WAVES, layers_of_stages
from mindspeed.pipeline.schedule.placement import Placement

Flags = Mapping[str, Any]

OPTIMIZERS: dict[str, Flags] = {
    "replicated": {"use_distributed_optimizer": None, "zero_stage": None},
    "distributed": {"use_distributed_optimizer": True, "zero_stage": None},
    "zero2": {"use_distributed_optimizer": None, "zero_stage": 2},
    "zero3": {"use_distributed_optimizer": None, "zero_stage": 3},
}
"""Flags by how data-parallel ranks shard the optimizer."""


def _program(text: str, dispatcher: str) -> Flags:
    """Flags of an expert program from their text."""
    flags: dict[str, Any] = {"moe_token_dispatcher_type": dispatcher}
    words = text.partition(":")[0].split() if text.startswith("--") else []
    for position, word in enumerate(words):
        if word.startswith("--"):
            after = words[position + 1 : position + 2]
            value: Any = True if not after or after[0].startswith("--") else after[0]
            name = word[2:].replace("-", "_")
            flags[name] = int(value) if isinstance(value, str) and value.isdigit() else value
    return flags


@functools.cache
def expert_programs() -> Mapping[str, Flags]:
    """Flags by expert program; an extended one is sizes of a layout.

    ``etp`` is 1 there, and ``tp`` divides ``ep``. A search counts on any device, and carriers that
    only some devices have are refused on others.
    """
    from mindspeed.moe.comparison import ENTRIES  # formulas of all programs: most jobs need none

    return {
        name: _program(entry.flags, entry.dispatcher)
        for name, entry in ENTRIES.items()
        if not entry.extended and not entry.carrier
    }


def memory_flags(names: Collection[str]) -> dict[str, Any]:
    """Flags with which a job has these memory options, and no others but those that it keeps."""
    known = options("memory")
    others = [one.flags for one in known.values() if not one.kept]
    flags: dict[str, Any] = dict.fromkeys(
        name for table in others for name, value in table.items() if value is True
    )
    for name in names:
        flags |= known[name].flags
    return flags


@dataclass(frozen=True)
class Recompute:
    """Recomputation in backward.

    Attributes:
        modules: modules of Megatron's ``--recompute-modules``, for selective recomputation.
        layers: number of fully recomputed layers of every chunk; -1: all.
    """

    modules: tuple[str, ...] = ()
    layers: int = 0

    def __post_init__(self) -> None:
        if self.modules and self.layers:
            raise ValueError("layers are recomputed as a whole or by modules, not both")

    def __str__(self) -> str:
        if self.layers:
            return "full" if self.layers < 0 else f"full:{self.layers}"
        return "+".join(self.modules) or "none"

    def overrides(self) -> Flags:
        """Values of the job's flags, by argument name."""
        none: dict[str, Any] = dict.fromkeys(_RECOMPUTE)
        if self.modules:
            modules = list(self.modules)
            return none | {"recompute_granularity": "selective", "recompute_modules": modules}
        if not self.layers:
            return none
        method = "uniform" if self.layers < 0 else "block"
        return none | {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": max(self.layers, 1),
        }


_RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "checkpoint_activations",
    "checkpoint_policy",
)


def algorithm_flags(name: str, cp: int) -> Flags:
    """Flags of a context-parallel algorithm, which replace Megatron's ``--cp-comm-type``."""
    base, _, degree = name.partition(":")
    flags = {
        "cp_comm_type": None,
        "ulysses_degree_in_cp": None,
        **options("cp_algorithm")[base].flags,
    }
    if degree:
        flags["ulysses_degree_in_cp"] = int(degree)
    return flags if cp > 1 else dict.fromkeys(flags)


_SPLITS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass(frozen=True)
class Layout:
    """A candidate layout; None keeps the job's value, except where stated.

    Attributes:
        devices: ranks of the job.
        global_batch_size: samples of a step.
        tp: tensor parallel size.
        sequence_parallel: whether tensor-parallel ranks share the sequence between their products.
        cp: context parallel size.
        cp_algorithm: an option of a feature; ``hybrid:4`` also sets ``ulysses_degree_in_cp`` to 4.
        ep: expert parallel size.
        etp: expert tensor parallel size; None: Megatron's default, ``tp``.
        pp: pipeline parallel size.
        vpp: model chunks of a pipeline rank.
        stage_layers: transformer layers of each stage, in the order in which a micro-batch passes
            them; None: evenly.
        schedule: value of ``--pipeline-schedule``; None: Megatron's 1F1B or interleaved schedule.
        schedule_flag: argument of the job that asks for this schedule instead, such as
            ``use_nanopipe``.
        mbs: samples of a micro-batch.
        recompute: recomputation in backward.
        optimizer: key of :data:`OPTIMIZERS`.
        precision: an option of a feature.
        expert_program: key of :func:`expert_programs`.
        memory: options of features that save memory, sorted.
    """

    devices: int
    global_batch_size: int
    tp: int = 1
    sequence_parallel: bool = True
    cp: int = 1
    cp_algorithm: str | None = None
    ep: int = 1
    etp: int | None = None
    pp: int = 1
    vpp: int = 1
    stage_layers: tuple[int, ...] | None = None
    schedule: str | None = None
    schedule_flag: str | None = None
    mbs: int = 1
    recompute: Recompute | None = None
    optimizer: str | None = None
    precision: str | None = None
    expert_program: str | None = None
    memory: tuple[str, ...] | None = None

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.devices // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.devices // (self.expert_tp * self.ep * self.pp)

    @property
    def expert_tp(self) -> int:
        """Expert tensor parallel size."""
        return self.tp if self.etp is None else self.etp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one data-parallel rank."""
        return self.global_batch_size // (self.mbs * self.dp)

    @property
    def sequence_shards(self) -> int:
        """Ranks that share what lies between the products of a layer."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def v_shaped(self) -> bool:
        """Whether a pipeline rank has two chunks, the first and the last stage on rank 0."""
        return self.schedule in V_SHAPES

    @property
    def placed(self) -> bool:
        """Whether stages are not in Megatron's loop: in a V or in waves."""
        return self.v_shaped or self.schedule in WAVES

    @property
    def placement(self) -> Placement:
        """Stages of each pipeline rank."""
        if self.placed:
            return Placement.snake(self.pp, 2 if self.v_shaped else self.vpp)
        return Placement.loop(self.pp, self.vpp)

    @property
    def several_chunks(self) -> bool:
        """Whether a pipeline rank has more than one chunk."""
        return self.pp > 1 and (self.vpp > 1 or self.v_shaped)

    def overrides(self) -> dict[str, Any]:
        """Values of the job's flags, by argument name."""
        flags: dict[str, Any] = dict.fromkeys(
            (*_SPLITS, *flags_planned_as("lays out"), *schedule_flags())
        )
        flags.pop(self.schedule_flag or "", None)
        flags |= {
            "global_batch_size": self.global_batch_size,
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": True if self.tp > 1 and self.sequence_parallel else None,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep if self.ep > 1 else None,
            "expert_tensor_parallel_size": self.etp,
            "pipeline_model_parallel_size": self.pp,
            "micro_batch_size": self.mbs,
            "gradient_accumulation_steps": None,
            "pipeline_schedule": None if self.schedule_flag else self.schedule,
        }
        if self.stage_layers is not None and self.placed:
            flags["pipeline_model_parallel_layout"] = _text_of_stages(self.stage_layers)
        elif self.stage_layers is not None:
            flags["pipeline_num_transformer_layers"] = _matrix(self.stage_layers, self.pp)
        elif self.vpp > 1 and not self.v_shaped:
            flags["num_virtual_stages_per_pipeline_rank"] = self.vpp
        if self.recompute is not None:
            flags |= self.recompute.overrides()
        if self.optimizer is not None:
            flags |= OPTIMIZERS[self.optimizer]
        if self.precision is not None:
            flags |= options("precision")[self.precision].flags
        if self.cp_algorithm is not None:
            flags |= algorithm_flags(self.cp_algorithm, self.cp)
        if self.expert_program is not None:
            flags |= dict.fromkeys(name for table in expert_programs().values() for name in table)
            flags |= expert_programs()[self.expert_program]
        if self.memory is not None:
            flags |= memory_flags(self.memory)
        return flags

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, by chunk."""
        return self.placement.stages[rank]

    def signature(self) -> Layout:
        """The layout with the same counts of a layer and micro-batch, in a normal form.

        It has one pipeline stage and one micro-batch on one data-parallel rank; layouts with equal
        signatures are priced from the same recordings.
        """
        recompute = self.recompute
        if recompute is not None and recompute.layers > 0:
            recompute = Recompute(layers=-1)
        devices = self.tp * self.cp
        experts = self.ep * self.expert_tp
        devices = math.lcm(devices, experts)
        return replace(
            self,
            devices=devices,
            global_batch_size=self.mbs * devices // (self.tp * self.cp),
            pp=1,
            vpp=1,
            stage_layers=None,
            schedule=None,
            schedule_flag=None,
            recompute=recompute,
        )

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON."""
        values = asdict(self)
        values["recompute"] = None if self.recompute is None else str(self.recompute)
        return values | {"dp": self.dp, "micro_batches": self.micro_batches}

    def __str__(self) -> str:
        """Format the values that are not the defaults, as ``tp=8 pp=4 dp=32 mbs=1``."""
        shown = {"dp": self.dp}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("tp", "pp", "mbs") or value != item.default:
                shown[item.name] = value
        for name in ("devices", "global_batch_size"):
            shown.pop(name)
        order = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "mbs")
        names = [name for name in order if name in shown]
        names += [name for name in shown if name not in order]
        return " ".join(f"{name}={_text(shown[name])}" for name in names)


def layout_of(args: argparse.Namespace) -> Layout:
    """Read the layout of a job from its final values; other fields keep the job's values."""
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    layers = None
    if args.pipeline_model_parallel_layout is not None:
        counts = layers_of_stages(vars(args))
        layers = None if len(set(counts)) == 1 and len(counts) == pp * vpp else counts
    asked = {name: kind for name, kind in schedule_flags().items() if vars(args).get(name)}
    flag, schedule = next(iter(asked.items()), (None, vars(args).get("pipeline_schedule")))
    return Layout(
        devices=args.world_size,
        global_batch_size=args.global_batch_size,
        tp=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel or args.tensor_model_parallel_size == 1,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size if args.num_experts else None,
        pp=pp,
        vpp=vpp,
        stage_layers=layers,
        schedule=schedule,
        schedule_flag=flag,
        mbs=args.micro_batch_size,
    )


def _matrix(stage_layers: tuple[int, ...], pp: int) -> str:
    """Format as ``[[9,10],[10,10],[10,9]]``: a row per rank, a column per chunk."""
    rows = [stage_layers[rank::pp] for rank in range(pp)]
    return "[" + ",".join("[" + ",".join(map(str, row)) + "]" for row in rows) + "]"


def _text_of_stages(stage_layers: tuple[int, ...]) -> str:
    """Format as Megatron's layout string."""
    return "E" + "|".join("t" * count for count in stage_layers) + "L"


def _text(value: Any) -> str:
    """Format a tuple of numbers as ``1x47+2x16+1``, one of names as ``a+b``."""
    if not isinstance(value, tuple):
        return str(value)
    runs = [(one, len(list(equal))) for one, equal in groupby(value)]
    return "+".join(str(one) if n == 1 else f"{one}x{n}" for one, n in runs) or "none"
