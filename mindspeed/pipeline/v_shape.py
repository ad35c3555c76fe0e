"""Whether the model chunks of a job stand in a V-shape, and their layout.

``--schedules-method dualpipev`` and ``--pipeline-schedule`` with one of :data:`SCHEDULES` or a file
of such a schedule say so (:mod:`mindspeed.pipeline.megatron_v_shape`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.pipeline.layout import even_layout

if TYPE_CHECKING:
    from mindspeed.pipeline.megatron_v_shape import VShapeLayout

SCHEDULES = ("zb-v", "dualpipev", "v-half", "v-min", "v-auto")


def flag_of(values: Mapping[str, Any]) -> str | None:
    """The flag, with its value, that asks for a V-shape; None if none does."""
    if values.get("schedules_method") == "dualpipev":
        return "--schedules-method dualpipev"
    schedule = values.get("pipeline_schedule")
    if schedule in SCHEDULES or _is_v_shaped_file(schedule or ""):
        return f"--pipeline-schedule {schedule}"
    return None


def _is_v_shaped_file(name: str) -> bool:
    """Whether this is a csv file of a schedule in a V-shape; what is wrong with it, others say."""
    if not name.endswith(".csv"):
        return False
    from mindspeed.pipeline.schedule.csv_file import read_plan
    from mindspeed.pipeline.schedule.placement import Placement

    try:
        placement = read_plan(Path(name)).placement
    except ConfigError:
        return False
    return placement == Placement.v_shape(placement.ranks)


def layout_of(values: Mapping[str, Any]) -> VShapeLayout | None:
    """What the config of a model in a V-shape has as layout; None without a V-shape.

    Args:
        values: final arguments.
    """
    if flag_of(values) is None:
        return None
    from mindspeed.pipeline.megatron_v_shape import VShapeLayout

    ranks = values["pipeline_model_parallel_size"]
    layout = values.get("pipeline_model_parallel_layout")
    if layout is None:
        layout = even_layout(values["num_layers"], ranks, values.get("mtp_num_layers") or 0)
    return VShapeLayout(layout, ranks)
