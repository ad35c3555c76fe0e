"""Prices of pipeline schedules beside those of torch and of Megatron, on one clock.

    python benchmarks/pipeline_prices.py         # half a minute, writes benchmarks/results

Nothing is measured: every table runs on the simulator, so the figures are the same anywhere. Tables
of torch.distributed.pipelining are made by its own code and read from its csv files; Megatron's
orders are those that its schedules run (tests compare them action by action), and the table of its
combined 1F1B is made by its own functions. Torch runs the members of
DualPipeV's pairs one after the other; its table is priced as if they overlapped, too.

Times are relative to the forward of a micro-batch on a rank, memory to its activations there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import read_plan
from mindspeed.pipeline.schedule.front import within
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.weave import WeavingJob

OUT = Path(__file__).parent / "results" / "pipeline-prices.json"
TIMES = {
    "equal": Costs(),
    "unequal": Costs(1, 1.1, 0.9),
    "latency": Costs(latency=0.1),
}
EXCHANGE, LAYERS = (0.5, 0.75), 8
Make = Callable[[Costs], Plan]


def ours(kind: str, p: int, v: int, m: int, **changes: Any) -> Make:
    """A schedule by its name."""
    return lambda costs: build_plan(ScheduleRequest(kind=kind, costs=costs, **changes), p, v, m)


def front(p: int, m: int, cap: float) -> Make:
    """The fastest block within ``cap``."""

    def make(costs: Costs) -> Plan:
        found = within(p, WeavingJob(m, costs), cap)
        assert found is not None
        return found.plan

    return make


def of_torch(name: str, p: int, v: int, m: int) -> Make:
    """The table that a schedule class of torch makes."""
    stages = [
        SimpleNamespace(
            num_stages=p * v,
            group_size=p,
            group_rank=0,
            stage_index=stage,
            is_last=False,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank=None,
        )
        for stage in range(v)
    ]
    schedule: Any = torch_schedules.get_schedule_class(name)(stages, m)  # type: ignore[call-arg, arg-type]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "torch.csv"
        schedule._dump_csv(str(file), format="compute_only")
        plan = read_plan(file, ranks=p, chunks=v, num_microbatches=m)
    return lambda costs: plan


def of_megatron(p: int, v: int, m: int) -> Make:
    """The table of Megatron's combined 1F1B: all forwards and backwards in between are pairs."""
    from megatron.core.pipeline_parallel import schedules as megatrons

    order, rows, pairs = megatrons.get_schedule_table(m, v, p), [], set()
    for rank in range(p):
        group = SimpleNamespace(size=lambda: p, rank=lambda rank=rank: rank)
        where = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=v)
        options = {"overlap_moe_expert_parallel_comm": True, "p2p_communicator": where}
        total, _, warmup, _ = megatrons.get_pp_rank_microbatches(m, v, p, **options)
        forwards = [Action("F", chunk * p + rank, i) for i, chunk in order]
        backwards = [Action("B", (v - 1 - chunk) * p + rank, i) for i, chunk in order]
        between = zip(forwards[warmup:], backwards, strict=False)
        row = [*forwards[:warmup], *(one for pair in between for one in pair)]
        rows.append((*row, *backwards[total - warmup :]))
        pairs |= set(forwards[warmup:])
    placement = Placement.loop(p, v)
    plan = Plan(placement, tuple(rows), m, name="combined 1F1B", paired=frozenset(pairs))
    return lambda costs: plan


def schedules(p: int, m: int) -> Iterator[tuple[str, str, int, Make]]:
    """Name, whose it is, chunks, and what makes it."""
    yield "1F1B", "Megatron, torch", 1, ours("1f1b", p, 1, m)
    yield "interleaved", "Megatron, torch", 2, ours("interleaved", p, 2, m)
    yield "interleaved zero bubble", "torch", 2, of_torch("InterleavedZeroBubble", p, 2, m)
    yield "ZBV", "torch", 2, of_torch("ZBVZeroBubble", p, 2, m)
    yield "DualPipeV, one after the other", "torch", 2, _flat(of_torch("DualPipeV", p, 2, m))
    for kind, chunks in (("zb-h1", 2), ("nanopipe", 2), ("zb-v", 2), ("v-half", 2), ("v-min", 2)):
        yield kind, "ours", chunks, ours(kind, p, chunks, m)
    for cap in (p / 2, 3 * p / 8):
        yield f"v-auto within {cap:g} A", "ours", 2, front(p, m, cap)
    for kind in ("wave", "zb-wave"):
        yield kind, "ours", 4, ours(kind, p, 4, m)


def _flat(make: Make) -> Make:
    return lambda costs: make(costs).without_pairs()


def pairs(p: int, m: int) -> Iterator[tuple[str, str, int, Make]]:
    """The same of tables with pairs."""
    yield "combined 1F1B", "Megatron", 2, of_megatron(p, 2, m)
    yield "DualPipeV", "torch, as if they overlapped", 2, of_torch("DualPipeV", p, 2, m)
    for kind in ("interleaved", "dualpipev", "zb-v", "nanopipe"):
        yield kind, "ours", 2, ours(kind, p, 2, m, pairs=True)


def priced(p: int, m: int) -> dict[str, Any]:
    """All figures for some ranks and micro-batches."""
    rows = []
    for name, whose, chunks, make in schedules(p, m):
        found = {of: simulate(make(costs), costs) for of, costs in TIMES.items()}
        bubbles = {of: round(one.makespan - 3 * m, 3) for of, one in found.items()}
        memory = round(max(found["equal"].peak_memory), 3)
        rows.append({"schedule": name, "of": whose, "chunks": chunks, "memory": memory, **bubbles})
    return {"ranks": p, "microbatches": m, "schedules": rows, "pairs": priced_pairs(p, m)}


def priced_pairs(p: int, m: int) -> list[dict[str, Any]]:
    """Steps of tables with pairs."""
    together = []
    for name, whose, chunks, make in pairs(p, m):
        row: dict[str, Any] = {"schedule": name, "of": whose, "chunks": chunks}
        for x in EXCHANGE:
            costs = Costs(exchange=x, layers=LAYERS)
            found_one = simulate(make(costs), costs)
            row |= {f"{x:g}": round(found_one.makespan, 3)}
            row["memory"] = round(max(found_one.peak_memory), 3)
        together.append(row)
    return together


def main() -> None:
    """Price everything, print and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = priced(args.ranks, args.microbatches)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for rows in (found["schedules"], found["pairs"]):
        for row in rows:
            print("  ".join(f"{value!s:>10}" for value in row.values()))


if __name__ == "__main__":
    main()
