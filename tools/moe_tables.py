"""Keep the tables of mixture-of-experts programs in the documentation equal to what prices them.

python tools/moe_tables.py            write the tables between their markers
python tools/moe_tables.py --check    fail where one is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys

from feature_table import ROOT, update

from mindspeed.cli import moe
from mindspeed.moe.comparison import LayerJob, PricedProgram, compare
from mindspeed.moe.costs import BACKWARD, FORWARD
from mindspeed.moe.simulate import RankRates
from mindspeed.moe.sizes import Sizes

OVERVIEW, REFERENCE = ROOT / "docs" / "moe.md", ROOT / "docs" / "moe-plan.md"
RECORDED = ROOT / "docs" / "features" / "moe-record-routing.md"
PLACEMENTS = ROOT / "benchmarks" / "results" / "moe-placement.json"
COUNTED = ROOT / "benchmarks" / "results" / "cpu-moe-counts.json"
MEASURED = ROOT / "benchmarks" / "results" / "cpu-moe.json"
PROGRAMS = (
    "megatron", "shared-overlap", "1f1b", "async", "overlap", "overlap-level1", "balanced",
    "ampipe", "fb-overlap",
)  # fmt: skip
NO_TIME = RankRates(1.0, lambda message: 0.0)


def exposed_table() -> str:
    """Collectives that nothing hides, with and without shared experts: the same for all sizes."""
    head = "| program | flags | collectives, forward + backward | exposed | with shared experts |"
    lines = [head, "|---" * 5 + "|"]
    plain = Sizes(tokens=64, hidden=16, experts=8, topk=2, ffn=32, ep=2)
    shared = Sizes(**(vars(plain) | {"shared": 32}))
    for without, found in zip(
        compare(LayerJob(plain, NO_TIME), PROGRAMS),
        compare(LayerJob(shared, NO_TIME), PROGRAMS),
        strict=True,
    ):
        cells = [found.name, code(found.flags), calls(found)]
        cells += [exposed(without) if without.simulation else "", exposed(found)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def priced_table(number: int = 0) -> str:
    """What a command of the page prints; the first one by default."""
    lines = ["| program | flags | sent | exposed collectives | waiting | layer | kept |"]
    lines.append("|---" * 7 + "|")
    for one in compare(*job_of_page(number)):
        assert one.simulation is not None, one.reason
        between = sum(m.between for found in one.simulation.messages.values() for m in found)
        total = one.simulation.wire()
        cells = [
            one.name,
            code(one.flags),
            f"{total / 1e9:.2f} GB, {between / 1e9:.2f} between nodes",
            f"{exposed(one)} of {calls(one)}",
            f"{one.simulation.exposed() * 1e3:.1f} ms",
            f"{one.simulation.total * 1e3:.1f} ms",
            f"{one.kept / 1e6:.0f} MB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def job_of_page(number: int) -> tuple[LayerJob, list[str]]:
    """The job and the programs of one ``mindspeed moe plan`` of the page."""
    commands = re.findall(
        r"^mindspeed moe (plan (?:.*\\\n)*.*)$", REFERENCE.read_text("utf-8"), re.M
    )
    parser = argparse.ArgumentParser()
    moe.add_arguments(parser)
    args = parser.parse_args(shlex.split(commands[number].replace("\\\n", " ")))
    return moe.job_of(args), args.programs.split(",")


def measured_table() -> str:
    """Step times of ``benchmarks/moe.py`` beside the simulation, relative to Megatron's layer."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row["shared"] and row["ratio"] == 1.0]
    own = next(row for row in rows if row["program"] == "megatron")
    lines = ["| program | measured | simulated |", "|---" * 3 + "|"]
    for row in rows:
        parts = (f"{row[name] / own[name]:.2f}" for name in ("seconds", "simulated"))
        lines.append(f"| {row['program']} | " + " | ".join(parts) + " |")
    return "\n".join(lines)


def counted_table() -> str:
    """What a step sends, computes and reads, by ``benchmarks/moe.py --counts``."""
    rows = json.loads(COUNTED.read_text(encoding="utf-8"))["rows"]
    own = sum(rows[0]["sent"])
    lines = [
        "| program | flags | collectives: forward + again + backward | bytes | GFLOPs "
        "| sizes copied to the host |"
    ]
    lines.append("|---" * 6 + "|")
    for row in rows:
        name = row["program"] if row["counted"] else f"{row['program']} (by its source)"
        cells = [name, code(row["flags"]), " + ".join(map(str, row["calls"]))]
        cells.append(f"{sum(row['sent']) / own:.2f}")
        cells.append(f"{row['flops'] / 1e9:.2f}" if row["flops"] else "")
        cells.append("" if row["host_reads"] < 0 else str(row["host_reads"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def code(flags: str) -> str:
    """Flags as code, the remark about them as text."""
    flags, _, remark = flags.partition(": ")
    flags = f"`{flags}`" if flags.startswith("--") else flags
    return f"{flags}, {remark}" if remark else flags


def calls(one: PricedProgram) -> str:
    """Collectives of forward + backward."""
    assert one.simulation is not None
    return f"{one.simulation.calls(FORWARD)} + {one.simulation.calls(BACKWARD)}"


def exposed(one: PricedProgram) -> str:
    """Those of them with no computation beside them."""
    return f"{one.exposed(FORWARD)} + {one.exposed(BACKWARD)}"


def placement_table() -> str:
    """Fullest rank over the mean, by ``benchmarks/moe.py --placement``."""
    lines = [
        "| experts | ranks | exponent | in order | largest first | placed | hottest | with copies |"
    ]
    lines.append("|---" * 8 + "|")
    for row in json.loads(PLACEMENTS.read_text()):
        experts, ranks, exponent, *figures = row.values()
        cells = [str(experts), str(ranks), str(exponent), *(f"{one:.3f}" for one in figures)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    check = parser.parse_args(arguments).check
    tables = {
        OVERVIEW: {"exposed": exposed_table(), "counted": counted_table()},
        REFERENCE: {
            "priced": priced_table(),
            "bounded": priced_table(1),
            "measured": measured_table(),
        },
        RECORDED: {"placements": placement_table()},
    }
    return update(tables, "moe_tables", check=check)


if __name__ == "__main__":
    sys.exit(main())
