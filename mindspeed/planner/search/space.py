"""Candidates of a search: the values of each dimension, and which combinations can exist.

    space = Space.of(sizes, node_size=8)
    removed = Counter()
    for layout in space.layouts(sizes, removed): ...

Combinations that sizes rule out are removed here, at the first dimension whose value is impossible,
and counted by reason. What only a dry run knows is checked later
(:mod:`mindspeed.planner.search.bounded_search`).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from mindspeed.features.registry import options
from mindspeed.flags import read
from mindspeed.job import Batch
from mindspeed.models.model_config import ModelConfig
from mindspeed.pipeline.placed_stages import V_SHAPES, WAVES
from mindspeed.planner.layout import OPTIMIZERS, Layout, Recompute, expert_programs
from mindspeed.planner.shape import FeatureFlags

Split = str | tuple[int, ...]
Point = Mapping[str, Any]


@dataclass(frozen=True)
class JobSizes:
    """Sizes of a job that its layout must divide.

    Attributes:
        query_groups: groups of grouped-query attention; else the number of heads.
        seq_length: tokens of a sample.
        experts: experts of a layer; 0 in a dense model.
        aligned: whether sizes must be divisible by ``tp``.
        lacking: memory options that are never worse, and that the job lacks.
    """

    devices: int
    global_batch_size: int
    num_layers: int
    heads: int
    query_groups: int
    seq_length: int
    experts: int = 0
    aligned: bool = True
    lacking: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace, devices: int) -> JobSizes:
        """Read the sizes of a job, on ``devices`` ranks, from its final values in any layout."""
        model = read(ModelConfig, args)
        heads = model.num_attention_heads
        return cls(
            devices,
            Batch.of(args).whole,
            model.num_layers,
            heads,
            model.num_query_groups if model.group_query_attention else heads,
            model.seq_length,
            model.num_experts or 0,
            not read(FeatureFlags, args).unaligned_linear,
            tuple(
                name
                for name, one in options("memory").items()
                if one.kept and not all(map(vars(args).get, one.flags))
            ),
        )


def stage_layers(
    num_layers: int, stages: int, split: Split, v_shaped: bool = False
) -> tuple[int, ...] | None:
    """Layers of each stage; None if the split does not exist.

    Args:
        num_layers: layers of the model.
        stages: stages of the pipeline, virtual ones included.
        split: ``even``, ``ends`` or the layers themselves. With ``ends`` the stages that have one
            layer less than the others are the last one, with the output layer, then the first ones,
            which hold most micro-batches.
        v_shaped: whether a rank has a stage on the way down and one on the way up. Then every rank
            gets one of these stages, from the first rank on, before one gets two.
    """
    if isinstance(split, tuple):
        return split if len(split) == stages and sum(split) == num_layers else None
    if split == "even":
        return None if num_layers % stages else (num_layers // stages,) * stages
    if stages < 2:
        return None
    longest = -(-num_layers // stages)
    fewer = stages * longest - num_layers
    order = range(stages - 1, stages // 2 - 1, -1) if v_shaped else (stages - 1,)
    lighter = [*order, *range(stages - len(order))][:fewer]
    return tuple(longest - (stage in lighter) for stage in range(stages)) if fewer else None


def reason_against(name: str, sizes: JobSizes, point: Point) -> str | None:
    """The reason why no layout with these values exists; None: one may.

    Args:
        name: the dimension whose value was chosen last.
        point: values of this dimension and of those before it, by name.
    """
    check = _CHECKS.get(name)
    return check(sizes, point) if check is not None else None


def _first(*found: tuple[Any, str]) -> str | None:
    """The first reason whose condition holds."""
    return next((reason for holds, reason in found if holds), None)


def _tensor(sizes: JobSizes, point: Point) -> str | None:
    tp, groups, aligned = point["tp"], sizes.query_groups, sizes.aligned
    return _first(
        (sizes.devices % tp, "devices are not divisible by tp"),
        (aligned and sizes.heads % tp, "attention heads are not divisible by tp"),
        (aligned and groups % tp and tp % groups, "neither query groups nor tp divide the other"),
        (aligned and sizes.seq_length % tp, "the sequence is not divisible by tp"),
    )


def _context(sizes: JobSizes, point: Point) -> str | None:
    tp, cp = point["tp"], point["cp"]
    return _first(
        (sizes.devices % (tp * cp), "devices are not divisible by tp x cp"),
        (cp > 1 and sizes.seq_length % (2 * cp), "the sequence is not divisible by 2 cp"),
    )


def _experts(sizes: JobSizes, point: Point) -> str | None:
    indivisible = point["ep"] > 1 and (not sizes.experts or sizes.experts % point["ep"])
    return _first((indivisible, "experts are not divisible by ep"))


def _pipeline(sizes: JobSizes, point: Point) -> str | None:
    tp, cp, ep, pp = (point[name] for name in ("tp", "cp", "ep", "pp"))
    inner = (tp if point["etp"] is None else point["etp"]) * ep * pp
    return _first(
        (sizes.devices % (tp * cp * pp), "devices are not divisible by tp x cp x pp"),
        (sizes.experts and sizes.devices % inner, "devices are not divisible by etp x ep x pp"),
    )


def _replicas(sizes: JobSizes, point: Point) -> int:
    return sizes.devices // int(point["tp"] * point["cp"] * point["pp"])


def _micro_batch(sizes: JobSizes, point: Point) -> str | None:
    rest = sizes.global_batch_size % (point["mbs"] * _replicas(sizes, point))
    return _first((rest, "the global batch is not divisible by mbs x dp"))


def _chunks(sizes: JobSizes, point: Point) -> str | None:
    vpp, pp = point["vpp"], point["pp"]
    return _first(
        (vpp > 1 and pp == 1, "vpp needs pp of at least 2"),
        (vpp * pp > sizes.num_layers, "more stages than layers"),
    )


def _v_shaped(point: Point) -> bool:
    return point["schedule"] in V_SHAPES


def _chunks_of(point: Point) -> int:
    """Chunks of a pipeline rank; a V-shape has two, whatever else is asked for."""
    return 2 if _v_shaped(point) else int(point["vpp"])


def _schedule(sizes: JobSizes, point: Point) -> str | None:
    schedule, pp = point["schedule"], point["pp"]
    if schedule is None:
        return None
    micro_batches = sizes.global_batch_size // (point["mbs"] * _replicas(sizes, point))
    few = schedule == "dualpipev" and micro_batches < 2 * pp
    return _first(
        (pp == 1, "schedules need pp of at least 2"),
        (pp * _chunks_of(point) > sizes.num_layers, "more stages than layers"),
        (schedule in WAVES and point["vpp"] == 1, "waves need vpp of at least 2"),
        (few, "dualpipev needs 2 pp micro-batches"),
    )


def _split(sizes: JobSizes, point: Point) -> str | None:
    stages, split = point["pp"] * _chunks_of(point), point["split"]
    if stage_layers(sizes.num_layers, stages, split, _v_shaped(point)) is not None:
        return None
    if isinstance(split, tuple):
        return "the layers of stages are those of another pp x vpp"
    return "layers are not divisible by pp x vpp" if split == "even" else _UNEVEN


def _sharding(sizes: JobSizes, point: Point) -> str | None:
    shards = point["optimizer"] in ("zero2", "zero3")
    return _first(
        (shards and point["pp"] > 1, "ZeRO 2 and 3 have no pipeline"),
        (shards and sizes.experts, "ZeRO 2 and 3 have no experts"),
    )


_UNEVEN = "layers are divisible by pp x vpp, so no stage has fewer"
_CHECKS: Mapping[str, Callable[[JobSizes, Point], str | None]] = {
    "tp": _tensor,
    "cp": _context,
    "ep": _experts,
    "pp": _pipeline,
    "mbs": _micro_batch,
    "vpp": _chunks,
    "schedule": _schedule,
    "split": _split,
    "optimizer": _sharding,
}

SEARCHED = ("tp", "cp", "cp_algorithm", "ep", "etp", "pp", "mbs", "vpp", "split", "recompute")
"""Default dimensions of a search; schedule, optimizer, expert program and memory features stay as
they are in the job."""


def searched_programs() -> tuple[str, ...]:
    """Expert programs that leave the numbers of a training as they are."""
    from mindspeed.moe.comparison import ENTRIES  # lazy, as in expert_programs

    return tuple(name for name in expert_programs() if ENTRIES[name].exact)


SAME = "the same as another combination"


@dataclass(frozen=True)
class Space:
    """Values of each dimension, which are fields of :class:`Layout`.

    Attributes:
        recompute: recomputation; a fraction is that of the layers of a chunk.
        split: split of layers among stages (:func:`stage_layers`).
    """

    tp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    cp_algorithm: tuple[str | None, ...] = (None,)
    ep: tuple[int, ...] = (1,)
    etp: tuple[int | None, ...] = (None,)
    pp: tuple[int, ...] = (1,)
    mbs: tuple[int, ...] = (1,)
    vpp: tuple[int, ...] = (1,)
    schedule: tuple[str | None, ...] = (None,)
    split: tuple[Split, ...] = ("even",)
    recompute: tuple[Recompute | Fraction | None, ...] = (None,)
    optimizer: tuple[str | None, ...] = (None,)
    precision: tuple[str | None, ...] = (None,)
    expert_program: tuple[str | None, ...] = (None,)
    memory: tuple[tuple[str, ...] | None, ...] = (None,)

    @classmethod
    def of(cls, sizes: JobSizes, node_size: int = 8) -> Space:
        """Default space of a search.

        Tensor parallelism stays within a node; a rank keeps at least 2,048 tokens of a sequence,
        and at most 32,768 tokens of a micro-batch. Chunks divide the layers, with or without the
        embedding and the head as a layer each.
        """
        powers = [2**n for n in range(21)]
        layers, longest = sizes.num_layers, max(1, 32768 // sizes.seq_length)
        experts = [n for n in powers if n <= sizes.experts and sizes.experts % n == 0]
        return cls(
            tp=tuple(n for n in powers if n <= node_size),
            cp=tuple(n for n in powers if n == 1 or sizes.seq_length // n >= 2048),
            cp_algorithm=("ulysses", "ring"),
            ep=tuple(experts) or (1,),
            etp=(1, None) if sizes.experts else (None,),
            pp=tuple(n for n in range(1, layers + 1) if sizes.devices % n == 0),
            mbs=tuple(n for n in (1, 2, 4, 8) if n <= longest),
            vpp=tuple(n for n in range(1, 13) if not (layers % n and (layers + 2) % n)),
            schedule=(None, *options("schedule")),
            split=("even", "ends"),
            recompute=(Recompute(), *(Fraction(n, 8) for n in range(1, 9))),
            optimizer=tuple(OPTIMIZERS),
            precision=(None, *options("precision")),
            expert_program=searched_programs() if sizes.experts else (None,),
            memory=_memory_sets(sizes.lacking),
        )

    @property
    def total(self) -> int:
        """Number of combinations."""
        return math.prod(len(getattr(self, item.name)) for item in fields(self))

    @property
    def several(self) -> dict[str, tuple[str, ...]]:
        """Values of the dimensions that have several, as texts."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: tuple(map(text_of, v)) for name, v in values.items() if len(v) > 1}

    def only(self, names: Sequence[str], otherwise: Layout) -> Space:
        """Fix all dimensions but those in ``names`` to the values of a layout."""
        layout_fields = {item.name for item in fields(Layout)}
        fixed: dict[str, Any] = {
            item.name: (getattr(otherwise, item.name),)
            for item in fields(self)
            if item.name not in names and item.name in layout_fields
        }
        if "split" not in names:
            fixed["split"] = (otherwise.stage_layers or "even",)
        return replace(self, **fixed)

    def with_values(self, values: Mapping[str, Sequence[Any]]) -> Space:
        """Replace the values of some dimensions."""
        return replace(self, **{name: tuple(chosen) for name, chosen in values.items()})

    def layouts(self, sizes: JobSizes, removed: Counter[str]) -> Iterator[Layout]:
        """Yield all combinations that can exist, each once.

        Args:
            removed: receives the number of impossible ones, by reason.
        """
        names = [item.name for item in fields(self)]
        below = [
            math.prod(len(getattr(self, name)) for name in names[position + 1 :])
            for position in range(len(names))
        ]
        point: dict[str, Any] = {}
        seen: set[Layout] = set()

        def extend(position: int) -> Iterator[Layout]:
            if position == len(names):
                layout = _layout(sizes, point)
                if layout in seen:
                    removed[SAME] += 1
                    return
                seen.add(layout)
                yield layout
                return
            name = names[position]
            for value in getattr(self, name):
                point[name] = value
                if reason := reason_against(name, sizes, point):
                    removed[reason] += below[position]
                else:
                    yield from extend(position + 1)

        return extend(0)


def _memory_sets(lacking: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """No memory option, each one and each pair, all with those that the job lacks."""
    names = [name for name, one in options("memory").items() if one.exact and not one.kept]
    sets = [pair for count in range(3) for pair in combinations(names, count)]
    return tuple(dict.fromkeys(((), *(tuple(sorted((*lacking, *one))) for one in sets))))


def text_of(value: Any) -> str:
    """A value of a dimension as ``--fix`` takes it; a fraction is that of the layers of a chunk."""
    if isinstance(value, Fraction):
        return "all layers" if value == 1 else f"{value} of the layers"
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _layout(sizes: JobSizes, point: Mapping[str, Any]) -> Layout:
    values = {**point, "vpp": _chunks_of(point)}
    stages = values["pp"] * values["vpp"]
    split, layers = values.pop("split"), None
    counts = stage_layers(sizes.num_layers, stages, split, _v_shaped(point)) or (0,)
    if split != "even" and len(set(counts)) > 1:
        layers = counts
    share = values["recompute"]
    if isinstance(share, Fraction):
        most = max(counts)
        number = math.ceil(share * most)
        values["recompute"] = Recompute(layers=-1 if number == most else number)
    if values["cp"] == 1:
        values["cp_algorithm"] = None
    if values["etp"] == values["tp"]:
        values["etp"] = None
    return Layout(sizes.devices, sizes.global_batch_size, stage_layers=layers, **values)
