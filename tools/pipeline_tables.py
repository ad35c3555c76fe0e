"""Keep the tables of pipeline bubbles in the documentation equal to the simulator and to the benchmark.

python tools/pipeline_tables.py            write the tables between their markers
python tools/pipeline_tables.py --check    fail where one is out of date
"""  # noqa: E501  # the summary is one line of help

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from feature_table import ROOT, update

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

OVERVIEW = ROOT / "docs" / "pipeline.md"
REFERENCE = ROOT / "docs" / "features" / "pipeline-schedule.md"
MEASURED = ROOT / "benchmarks" / "results" / "cpu-pipeline.json"
EXECUTED = ROOT / "benchmarks" / "results" / "pipeline-virtual.json"
PRICED = ROOT / "benchmarks" / "results" / "pipeline-prices.json"
RANKS, MICROBATCHES = 8, 32
TIMES = ((1, 1, 1), (31, 33, 28), (1, 1.2, 0.8), (1, 1.5, 0.5), (1, 0.7, 1.3), (1, 1.5, 1.5))
SCHEDULES = {  # kind -> model chunks of a rank
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 2,
    "nanopipe": 2,
    "zb-v": 2,
    "dualpipev": 2,
    "v-half": 2,
    "v-min": 2,
    "zb-wave": 2,
    "aiao": 2,
}


def simulated_table() -> str:
    """Bubbles of all schedules for several ratios of forward, input and weight gradients."""
    lines = ["| schedule | chunks | " + " | ".join(":".join(map(str, t)) for t in TIMES) + " |"]
    lines.append("|---" * (2 + len(TIMES)) + "|")
    for kind, chunks in SCHEDULES.items():
        bubbles = (f"{100 * bubble(kind, chunks, Costs(*times)):.1f}" for times in TIMES)
        lines.append(f"| {kind} | {chunks} | " + " | ".join(bubbles) + " |")
    return "\n".join(lines)


def bubble(kind: str, chunks: int, costs: Costs) -> float:
    """The part of a step in which the mean rank idles."""
    plan = build_plan(ScheduleRequest(kind=kind, costs=costs), RANKS, chunks, MICROBATCHES)
    return simulate(plan, costs).bubble


def measured_table() -> str:
    """What ``benchmarks/pipeline.py`` measured, beside the simulation."""
    lines = ["| ranks | schedule | chunks | simulated | measured | torch |", "|---" * 6 + "|"]
    for row in json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]:
        lines.append(_measured_row(row))
    return "\n".join(lines)


def _measured_row(row: dict[str, Any]) -> str:
    ours = " *" if row["torch_schedule"] == "our plan" else ""
    bubbles = (f"{100 * row[name]:.1f}" for name in ("simulated", "measured", "torch"))
    head = f"| {row['ranks']} | {row['schedule']} | {row['chunks']} | "
    return head + " | ".join(bubbles) + ours + " |"


def prices_table() -> str:
    """What ``benchmarks/pipeline_prices.py`` priced, without pairs."""
    lines = ["| schedule | of | chunks | memory, A | F = I = W | 1:1.1:0.9 | latency 0.1 |"]
    lines.append("|---" * 7 + "|")
    for row in json.loads(PRICED.read_text(encoding="utf-8"))["schedules"]:
        figures = (f"{row[name]:g}" for name in ("memory", "equal", "unequal", "latency"))
        lines.append(
            f"| {row['schedule']} | {row['of']} | {row['chunks']} | " + " | ".join(figures) + " |"
        )
    return "\n".join(lines)


def pairs_table() -> str:
    """The same of pairs."""
    lines = ["| pairs of | of | memory, A | x = 0.5 | x = 0.75 |", "|---" * 5 + "|"]
    for row in json.loads(PRICED.read_text(encoding="utf-8"))["pairs"]:
        figures = (f"{row[name]:g}" for name in ("memory", "0.5", "0.75"))
        lines.append(f"| {row['schedule']} | {row['of']} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def executed_table() -> str:
    """What ``benchmarks/pipeline.py --virtual`` executed: bubbles by ranks and schedule."""
    found: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in json.loads(EXECUTED.read_text(encoding="utf-8"))["rows"]:
        key = row["schedule"], row["chunks"], row["exchange"]
        found.setdefault(key, {})[row["ranks"]] = row
    sizes = sorted({ranks for rows in found.values() for ranks in rows})
    heads = "".join(f" {ranks} ranks | memory, A |" for ranks in sizes)
    lines = ["| schedule | chunks |" + heads, "|---" * (2 + 2 * len(sizes)) + "|"]
    for (kind, chunks, exchange), rows in found.items():
        name = f"{kind}, pairs" if exchange else kind
        figures = [f"{100 * rows[n]['executed']:.1f} | {rows[n]['memory']:g}" for n in sizes]
        lines.append(f"| {name} | {chunks} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    check = parser.parse_args(arguments).check
    tables = {
        OVERVIEW: {
            "simulated": simulated_table(),
            "prices": prices_table(),
            "pairs": pairs_table(),
            "measured": measured_table(),
            "executed": executed_table(),
        },
        REFERENCE: {"measured": measured_table()},
    }
    return update(tables, "pipeline_tables", check=check)


if __name__ == "__main__":
    sys.exit(main())
