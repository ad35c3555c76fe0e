"""Layers of pipeline stages, also of those not in Megatron's loop (stage s on rank s mod p).

``--schedules-method dualpipev``, ``--pipeline-schedule`` with one of :data:`V_SHAPES` or
:data:`WAVES`, or with a file whose stages stand otherwise, say so
(:mod:`mindspeed.pipeline.megatron_placement`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.pipeline.layout import even_layout, evenly, stage_counts, stage_layers
from mindspeed.pipeline.schedule.placement import Placement

if TYPE_CHECKING:
    from mindspeed.pipeline.megatron_placement import PlacedLayout

V_SHAPES = ("zb-v", "dualpipev", "v-half", "v-min", "v-auto")
WAVES = ("wave", "zb-wave")


def flag_of(values: Mapping[str, Any]) -> str | None:
    """The flag, with its value, that places the stages; None for Megatron's loop."""
    if values.get("schedules_method") == "dualpipev":
        return "--schedules-method dualpipev"
    schedule = values.get("pipeline_schedule") or ""
    if schedule in V_SHAPES + WAVES or _placement_in(schedule) is not None:
        return f"--pipeline-schedule {schedule}"
    return None


def placement_of(values: Mapping[str, Any]) -> Placement | None:
    """The stages of every rank; None for Megatron's loop."""
    schedule = values.get("pipeline_schedule") or ""
    ranks = values.get("pipeline_model_parallel_size") or 1
    if schedule in WAVES:
        return Placement.snake(ranks, values.get("virtual_pipeline_model_parallel_size") or 1)
    if values.get("schedules_method") == "dualpipev" or schedule in V_SHAPES:
        return Placement.v_shape(ranks)
    return _placement_in(schedule)


def _placement_in(name: str) -> Placement | None:
    """The placement in a csv file; None for a loop. What is wrong with a file, others say."""
    if not name.endswith(".csv"):
        return None
    try:
        return _placement_read(name, os.stat(name).st_mtime_ns)
    except (ConfigError, OSError):
        return None


@lru_cache(maxsize=4)
def _placement_read(name: str, _: int) -> Placement | None:
    from mindspeed.pipeline.schedule.csv_file import read_plan

    placement = read_plan(Path(name)).placement
    return None if placement.loops else placement


def layers_of_stages(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Transformer layers of each stage, in the order in which a micro-batch passes them.

    Args:
        values: final arguments.
    """
    if (layout := values.get("pipeline_model_parallel_layout")) is not None:
        return stage_counts(str(layout))
    ranks = values.get("pipeline_model_parallel_size") or 1
    chunks = values.get("virtual_pipeline_model_parallel_size") or 1
    layers = values.get("num_layers") or 1  # frameworks give it to the model only
    return stage_layers(evenly(layers, ranks, chunks))


def layout_string(values: Mapping[str, Any]) -> str:
    """Megatron's layout string of stages that are placed: the given one, else equal stages.

    Args:
        values: arguments whose stages are placed.
    """
    given = values.get("pipeline_model_parallel_layout")
    if given is not None:
        return str(given)
    placement = placement_of(values)
    assert placement is not None
    predicted = values.get("mtp_num_layers") or 0
    return even_layout(values["num_layers"], placement.num_stages, predicted)


def layout_of(values: Mapping[str, Any]) -> PlacedLayout | None:
    """The layout in the config of a model whose stages are placed; None for Megatron's loop.

    Args:
        values: final arguments.
    """
    placement = placement_of(values)
    if placement is None:
        return None
    from mindspeed.pipeline.megatron_placement import PlacedLayout

    return PlacedLayout(layout_string(values), placement)
