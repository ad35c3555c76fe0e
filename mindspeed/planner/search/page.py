"""The result of a search as one page to look at, without a network.

text = html_of([("16 devices", found, lambda layout: "mindspeed pretrain ...")])

The page is ``page.html`` with its data in it: every layout that was priced, in a sortable table and
in the plane of time and memory; of the chosen one the memory of pipeline ranks by kind, where the
time goes and what to type; and the nearest priced layout for another value of one dimension. The
best one is drawn action by action, too: the schedule, and what is alive on each pipeline rank over
the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.instruments.page import page_of
from mindspeed.planner.cluster import GIB
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.result import SearchResult

if TYPE_CHECKING:
    from mindspeed.planner.time.picture import StepPicture
    from mindspeed.planner.time.prediction import Prediction

MOST = 1000
"""Layouts of a page: so many of the fastest, besides the candidates and the front."""
_TEMPLATE = Path(__file__).with_suffix(".html")
_CHOICES = (
    *("tp", "cp", "cp_algorithm", "ep", "etp", "pp", "vpp", "stage_layers", "schedule", "mbs"),
    *("recompute", "optimizer", "precision", "expert_program", "memory"),
)

Command = Callable[[Layout], str]


def html_of(plans: Sequence[tuple[str, SearchResult, Command]]) -> str:
    """The page of searches.

    Args:
        plans: of each its title, its result, and what trains in one of its layouts.
    """
    return page_of(_TEMPLATE, json.dumps([_data(*one) for one in plans]))


def _data(title: str, found: SearchResult, command: Command) -> dict[str, Any]:
    chosen = dict(found.priced[:MOST])
    chosen |= {one.layout: one.prediction for one in (*found.front, *found.candidates)}
    front = {one.layout for one in found.front}
    layouts = [
        {**_layout(*one), "front": one[0] in front, "command": command(one[0])}
        for one in chosen.items()
    ]
    spread = found.interval
    return {
        "title": title,
        "facts": f"{found.devices} devices of {found.cluster}, {found.memory_limit / GIB:.1f} GiB "
        f"for the tensors of each; {found.fitting:,} of {found.total:,} combinations fit. Bytes of "
        "the best layout are counted, those of others are estimated within 3 %; seconds are a "
        "model.",
        "likely": "" if spread is None else spread.sentence,
        "assumed": found.assumed,
        "interval": None if spread is None else {"low": spread.low, "high": spread.high},
        "memory_limit": found.memory_limit,
        "layouts": layouts,
        "dimensions": [n for n in _CHOICES if len({one["values"][n] for one in layouts}) > 1],
        "best": list(chosen).index(found.best.layout) if found.candidates else 0,
        "nothing": "" if layouts else found.explain(),
        "searched": {name: list(values) for name, values in found.searched.items()},
        "removed": dict(found.removed),
    }


def _layout(layout: Layout, found: Prediction) -> dict[str, Any]:
    values = layout.to_json()
    return {
        "name": str(layout),
        "values": {name: str(values[name]) for name in _CHOICES},
        "seconds": found.seconds,
        "longest": max(found.seconds, found.uneven_seconds),
        "peak": found.peak_bytes,
        "tokens": found.tokens_per_second_per_device,
        "mfu": found.mfu,
        "bubble": found.bubble,
        "limit": found.limit,
        "time": found.parts,
        "ranks": [{**rank.static, "activations": rank.activations} for rank in found.ranks],
        "picture": None if found.picture is None else _picture(found.picture),
    }


def _picture(found: StepPicture) -> dict[str, Any]:
    drawn = [alive for row in found.rows for alive in (one.alive for one in row)]
    kinds = list(dict.fromkeys(kind for one in (*found.between, *drawn) for kind in one))
    return {
        "seconds": found.seconds,
        "kinds": kinds,
        "between": [[one.get(kind, 0) for kind in kinds] for one in found.between],
        "rows": [
            [(*one[:-1], *(one.alive.get(kind, 0) for kind in kinds)) for one in row]
            for row in found.rows
        ],
    }
