"""The candidates of a search: values of every dimension, and all their combinations.

    space = Space.of(sizes, node_size=8)
    removed = Counter()
    for layout in space.layouts(sizes, removed): ...

All combinations are counted. One that a start would refuse for its sizes is taken out here, and
counted by its reason; what only a start knows is asked of the start (:mod:`.bounded_search`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from mindspeed.planner.combinations import Sizes, Split, reason_against, stage_layers
from mindspeed.planner.layout import Layout
from mindspeed.planner.layout_flags import Recompute

SEARCHED = ("tp", "cp", "cp_algorithm", "ep", "etp", "pp", "mbs", "vpp", "split", "recompute")
"""Dimensions of a search that names none; the schedule, the optimizer, the expert program and
memory features are then as the job has them."""

SAME = "the same as another combination"


@dataclass(frozen=True)
class Space:
    """Values of each dimension, which are fields of :class:`Layout`.

    Attributes:
        recompute: what is computed again; a fraction is that part of the layers of a chunk.
        split: how layers are divided among stages: ``even``; ``ends``: not evenly, the last stage
            and the first ones have one layer less; or the layers of each stage.
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
    expert_program: tuple[str | None, ...] = (None,)
    memory: tuple[tuple[str, ...] | None, ...] = (None,)

    @classmethod
    def of(cls, sizes: Sizes, node_size: int = 8) -> Space:
        """What is searched unless the user says otherwise.

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
            pp=tuple(n for n in _divisors(sizes.devices) if n <= layers),
            mbs=tuple(n for n in (1, 2, 4, 8) if n <= longest),
            vpp=tuple(n for n in range(1, 13) if not (layers % n and (layers + 2) % n)),
            schedule=(None, "zb-h1", "zb-v", "dualpipev"),
            split=("even", "ends"),
            recompute=(Recompute(), *(Fraction(n, 8) for n in range(1, 9))),
            optimizer=("distributed",),
        )

    @property
    def total(self) -> int:
        """Number of combinations."""
        return math.prod(len(getattr(self, item.name)) for item in fields(self))

    def only(self, names: Sequence[str], otherwise: Layout) -> Space:
        """This space in some dimensions; the others as in a layout.

        Args:
            names: dimensions that are searched.
            otherwise: the layout of the job.
        """
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
        """This space with other values of some dimensions."""
        return replace(self, **{name: tuple(chosen) for name, chosen in values.items()})

    def layouts(self, sizes: Sizes, removed: Counter[str]) -> Iterator[Layout]:
        """All combinations that can exist, each once.

        Args:
            sizes: of the job.
            removed: gets the number of the others, by reason.
        """
        names = [item.name for item in fields(self)]
        behind = [
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
                    removed[reason] += behind[position]
                else:
                    yield from extend(position + 1)

        return extend(0)


def _layout(sizes: Sizes, point: Mapping[str, Any]) -> Layout:
    values = dict(point)
    stages = values["pp"] * values["vpp"]
    split, layers = values.pop("split"), None
    counts = stage_layers(sizes.num_layers, stages, split) or (0,)
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


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
