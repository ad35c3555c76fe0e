"""What fraction of memory bandwidth the Triton kernels should reach on an H200: no GPU needed.

    python benchmarks/triton_bandwidth.py           # needs Triton, not CUDA

Every kernel of a workload is compiled to an sm_90 binary. From its registers and shared memory
follows how many programs a multiprocessor holds; from its tile, how many bytes these have on the
way; from its instructions, how fast they can be issued. The estimate is the least of

    latency     bytes on the way / (bytes per ns a multiprocessor is to move * latency of memory)
    issue       instructions issued per ns / instructions per ns at full bandwidth
    copy        what a plain copy reaches

times the bytes that must move over those that do. It is an upper estimate, **not a measurement**:
the ends of a launch, barriers and slow integer products are left out. ``benchmarks/ops.py --device
cuda`` measures.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ops import triton_jobs

BYTES_PER_NS = 4800 / 132  # of one of the H200's multiprocessors
LATENCY_NS = 800  # of memory under load
INSTRUCTIONS_PER_NS = 4 * 1.7  # four schedulers, 1.7 GHz
COPY = 0.92  # of the nominal bandwidth
ROWS = 4096


@dataclass(frozen=True)
class Case:
    """One kernel: what a program's tile reads and writes.

    Attributes:
        operator: Name of the operator.
        hidden: Size that its workload is made for.
        read: Bytes read from memory per element of the tile.
        written: Bytes written per element.
        ahead: Tiles that are on their way while one is computed.
        extra: Additional bytes per element: partial sums, tables, statistics.
    """

    operator: str
    hidden: int
    read: float
    written: float
    ahead: int = 1
    extra: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """The figures of one case; ``kilobytes`` are on the way in one multiprocessor."""

    case: Case
    kernel: str
    registers: int
    programs: int
    kilobytes: float
    latency: float
    issue: float
    fraction: float


def cases() -> list[Case]:
    """The kernels that this page is about, in bf16."""
    found = []
    for hidden in (64, 128, 256, 1024, 4096, 8192):
        found.append(Case("rms_norm", hidden, 2, 2, extra=4 / hidden))
    for hidden in (64, 128, 256, 1024, 4096, 8192):
        ahead = 2 if hidden <= 8192 else 1
        found.append(Case("rms_norm_backward", hidden, 4, 2, ahead, extra=4 / hidden))
    for hidden in (1024, 4096):
        found.append(Case("dropout_add_norm", hidden, 4, 4, extra=8 / hidden))
        found.append(Case("dropout_add_norm_backward", hidden, 4, 4, extra=8 / hidden))
    for hidden in (128, 256, 1024, 4096):
        heads = hidden // 128
        found.append(Case("rotary_position_embedding", hidden, 2 + 8 / heads, 2))
    found.append(Case("moe_unpermute", 4096, 4, 2))
    found.append(Case("moe_unpermute_backward", 4096, 6, 4))
    return found


def estimate(case: Case) -> Estimate:
    """Compile a case and compute its figures."""
    launches = triton_jobs.compile_for_hopper(case.operator, case.hidden, torch.bfloat16, sass=True)
    launch = launches[0]
    shape = launch["meta"]
    tile = shape.get("TOKENS", 1) * shape.get("ROWS", 1) * shape["BLOCK"]
    tile *= shape.get("COLUMNS", 1) * (2 if "rotary" in case.operator else 1)
    share = min(1.0, case.hidden / shape["BLOCK"]) if "ROWS" in shape and tile else 1.0
    programs = launch["resident"]
    if case.operator.endswith("norm_backward"):  # as many as are started
        programs = min(programs, 16 // launch["warps"])
    moved = case.read + case.written
    on_the_way = programs * tile * share * case.read * case.ahead
    needed = BYTES_PER_NS * LATENCY_NS * case.read / moved
    instructions = launch["loop_instructions"] * launch["warps"] / (tile * share)
    issue = INSTRUCTIONS_PER_NS / (BYTES_PER_NS / moved * instructions)
    fraction = min(1.0, on_the_way / needed, issue) * COPY * moved / (moved + case.extra)
    return Estimate(
        case, launch["kernel"], launch["registers"], programs, on_the_way / 1024,
        min(on_the_way / needed, 9.9), min(issue, 9.9), fraction,
    )  # fmt: skip


def table(estimates: list[Estimate]) -> str:
    """A table in Markdown."""
    lines = [
        "| operator | hidden | bytes per element | registers | programs | KiB on the way | "
        "latency | issue | expected |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in estimates:
        c = one.case
        lines.append(
            f"| `{c.operator}` | {c.hidden} | {c.read + c.written:.3g} | {one.registers} | "
            f"{one.programs} | {one.kilobytes:.0f} | {one.latency:.1f} | {one.issue:.1f} | "
            f"{one.fraction:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(table([estimate(case) for case in cases()]))


if __name__ == "__main__":
    main()
