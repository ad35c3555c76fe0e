"""The picture of a comparison: relative error by layer and kind of tensor, one panel a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.cli.plot import GREY, check_format, figure_class, write_figure
from mindspeed.compare.names import layer_of

if TYPE_CHECKING:
    from mindspeed.compare.row import Row
    from mindspeed.compare.walk import Result

_LEAST, _MOST = -8.0, 0.0  # decimal exponents of the colours


def draw(path: Path, result: Result) -> None:
    """Write the picture as PNG, SVG or PDF.

    Rows are kinds of tensors in the order of the step, columns layers; a frame marks what differs
    by more than rounding explains.

    Raises:
        ConfigError: matplotlib is missing, or the file has another ending.
    """
    check_format("--plot", path)
    steps = sorted({row.name.step for row in result.rows})
    kinds = list(dict.fromkeys(_kind(row) for row in result.rows))
    columns = list(dict.fromkeys(_column(row) for row in result.rows))
    columns.sort(key=lambda one: (one.isdigit(), int(one) if one.isdigit() else 0))
    figure = figure_class()(
        figsize=(4 + 0.35 * len(columns) * len(steps), 1.5 + 0.16 * len(kinds)),
        layout="constrained",
    )
    panels = figure.subplots(1, len(steps), squeeze=False)[0]
    for panel, step in zip(panels, steps, strict=True):
        rows = [row for row in result.rows if row.name.step == step]
        image = _panel(panel, rows, kinds, columns)
        panel.set_title(f"step {step}", loc="left", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="relative error, power of ten", shrink=0.6)
    write_figure(figure, path)


def _panel(panel: Any, rows: list[Row], kinds: list[str], columns: list[str]) -> Any:
    values = [[math.nan] * len(columns) for _ in kinds]
    marked = set()
    for row in rows:
        at = kinds.index(_kind(row)), columns.index(_column(row))
        error = row.difference.error
        power = _LEAST if error == 0 else math.log10(min(error, 1.0)) if error < math.inf else _MOST
        known = values[at[0]][at[1]]
        values[at[0]][at[1]] = power if math.isnan(known) else max(known, power)
        if row.difference.differs:
            marked.add(at)
    image = panel.imshow(values, cmap="viridis", vmin=_LEAST, vmax=_MOST, aspect="auto")
    for y, x in marked:
        left, right, low, high = x - 0.45, x + 0.45, y - 0.45, y + 0.45
        frame = (left, right, right, left, left), (low, low, high, high, low)
        panel.plot(*frame, color="red", linewidth=0.8)
    panel.set_xticks(range(len(columns)), columns, rotation=90, fontsize=6)
    panel.set_yticks(range(len(kinds)), kinds, fontsize=5)
    panel.tick_params(color=GREY)
    return image


def _kind(row: Row) -> str:
    name = row.name
    module = name.module
    if layer_of(module) is not None:
        module = ".".join(module.split(".")[3:]) or "layer"
    return f"{name.when} {module} {name.what}"


def _column(row: Row) -> str:
    layer = layer_of(row.name.module)
    return "other" if layer is None else str(layer)
