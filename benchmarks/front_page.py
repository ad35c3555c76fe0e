"""Draw the two graphs of the README from figures that other benchmarks measured.

    python benchmarks/trainer_vs_megatron.py --megatron DIR --json benchmarks/results/cpu-trainer-vs-megatron.json
    python benchmarks/ops.py --json benchmarks/results/cpu-ops.json
    python benchmarks/front_page.py

Left: time of a step of our trainer over Megatron-LM's own loop, the same model and adaptor. Right:
bf16 operators, forward and backward together, over eager PyTorch; every operator is shown.
"""  # noqa: E501  # commands are copied

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FASTER, SLOWER = "#1f77b4", "#ff7f0e"


def main() -> None:
    """Read the figures, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures" / "results.png")
    options = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(1, 1.35))
    steps = json.loads((RESULTS / "cpu-trainer-vs-megatron.json").read_text())
    bars(left, {row["layout"]: 1 / row["ratio"] for row in steps})
    left.set_title("Steps per second, over Megatron-LM's own loop", fontsize=10)
    bars(right, operator_speeds(json.loads((RESULTS / "cpu-ops.json").read_text())["rows"]))
    right.set_title("Fused operators on a CPU (bf16), over eager PyTorch", fontsize=10)
    figure.tight_layout()
    figure.savefig(options.output, dpi=110)


def operator_speeds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Operator -> eager time over ours, forward and backward added, the fastest first."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row["dtype"] == "bf16":
            name = row["operator"].removesuffix("_backward")
            spent[name][row["contender"]] += row["milliseconds"]
    speeds = {name: times["eager"] / times["mindspeed"] for name, times in spent.items()}
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))


def bars(axes: Any, speeds: dict[str, float]) -> None:
    """One horizontal bar for each name; the line at 1 is equal speed."""
    names = list(speeds)[::-1]
    values = [speeds[name] for name in names]
    colors = [FASTER if value >= 1 else SLOWER for value in values]
    drawn = axes.barh([name.replace("_", " ") for name in names], values, color=colors, height=0.7)
    axes.bar_label(drawn, [f" {value:.2f}x" for value in values], fontsize=8)
    axes.axvline(1, color="#475569", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, max(values) * 1.15)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
