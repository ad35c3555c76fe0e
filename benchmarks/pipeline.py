"""Time of pipeline schedules with stages that sleep, against the simulation and against torch.

    python benchmarks/pipeline.py                # 4 and 8 ranks, some ten minutes
    python benchmarks/pipeline.py --quick
    python benchmarks/pipeline.py --virtual      # no seconds: the same on every machine

A stage sleeps instead of computing, so that 8 ranks overlap truly on two cores: forward, input
gradient and weight gradient of a micro-batch take ``--unit`` seconds each on a rank. The executor,
the messages (gloo) and the waiting are real. A bubble is the part of a step, from a barrier to the
end of the last rank, in which the mean rank does not sleep; the fastest of the repeats counts. The
simulation has no latency and no cost of starting an action, both of which are in the measurement.

The last column is torch.distributed.pipelining with the same sleeping stages: its own schedule of
this kind or, where it has none, our plan read from a csv file (*).

With ``--virtual`` nobody sleeps: the executor and its messages are the same, and every message
carries the clock of its sender, so how busy the machine is does not matter. Pairs of a forward and
a backward have rows there, with an all-to-all of half a forward.

Below it: processor time of what follows from a plan alone, once and at the start of every step.

Writes FILE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.channel import Directions, PeerToPeer, directions_of
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import write_plan
from mindspeed.pipeline.schedule.executor import Tensors, execute
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import PAIRED, ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.virtual_time import VirtualTime
from mindspeed.processes import free_port

SCHEDULES = (
    ("1f1b", 1, "Schedule1F1B"),
    ("zb-h1", 1, "ScheduleInterleavedZeroBubble"),
    ("interleaved", 2, "ScheduleInterleaved1F1B"),
    ("zb-h1", 2, "ScheduleInterleavedZeroBubble"),
    ("nanopipe", 2, None),
    ("aiao", 2, "ScheduleLoopedBFS"),
    ("zb-v", 2, "ScheduleZBVZeroBubble"),
    ("dualpipev", 2, "ScheduleDualPipeV"),
    ("v-half", 2, None),
    ("v-min", 2, None),
    ("wave", 4, None),
    ("zb-wave", 4, None),
)
STARTS = ((4, 2, 16), (8, 2, 64), (16, 4, 256))  # ranks, chunks, micro-batches
WIDTH = 16


@dataclass(frozen=True)
class Row:
    """A schedule on some ranks; bubbles are fractions of a step."""

    ranks: int
    schedule: str
    chunks: int
    microbatches: int
    simulated: float
    measured: float
    torch: float
    torch_schedule: str


@dataclass(frozen=True)
class VirtualRow:
    """A schedule executed in virtual time; bubbles are fractions of a step.

    Attributes:
        exchange: one all-to-all, in forwards; pairs hide it.
        memory: activations of the fullest rank, in A.
    """

    ranks: int
    schedule: str
    chunks: int
    microbatches: int
    exchange: float
    memory: float
    simulated: float
    executed: float


@dataclass(frozen=True)
class Start:
    """Processor seconds of a rank that a plan costs before its first message."""

    ranks: int
    chunks: int
    microbatches: int
    once: float
    each_step: float


class SleepingWork:
    """Stages that sleep as long as their actions take."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs

    def _sleep(self, action: Action, tensors: Tensors | None = None) -> Tensors:
        time.sleep(self._costs.seconds(self._plan, action))
        return [torch.zeros(WIDTH)]

    forward = backward = _sleep

    def pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Sleep as long as both take together."""
        time.sleep(self._costs.pair_seconds(self._plan, forward, backward))
        return [torch.zeros(WIDTH)], [torch.zeros(WIDTH)]

    def weight_gradients(self, action: Action) -> None:
        """Sleep."""
        self._sleep(action)

    def _nothing(self, action: Action) -> None:
        pass

    recompute = offload = load = reduce = handed_on = _nothing


class SleepingStage(pipelining.PipelineStage):
    """The same as a stage of torch's."""

    plan: Plan
    costs: Costs

    def _sleep(self, op: str) -> None:
        time.sleep(self.costs.seconds(self.plan, Action(op, self.stage_index, 0)))

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Sleep tF."""
        self._sleep("F")
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Sleep tI, and tW unless weight gradients follow."""
        self._sleep("B" if kwargs.get("full_backward", True) else "I")
        return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Sleep tW."""
        self._sleep("W")
        return super().backward_weight_one_chunk(*args, **kwargs)


def main() -> None:
    """Measure on all ranks, print and write what rank 0 found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.07, help="seconds of F, I and W each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedule", nargs="+", help="kinds (default: all)")
    parser.add_argument("--virtual", action="store_true", help="in virtual time: nobody sleeps")
    parser.add_argument("--quick", action="store_true", help="two ranks, four micro-batches")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--out", type=Path, default=Path("pipeline.json"))
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.microbatches, args.unit, args.repeats = [2], 4, 0.01, 1
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    rows = []
    for ranks in args.ranks:
        os.environ["MASTER_PORT"] = str(free_port())
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, args, folder), nprocs=ranks)
            rows += json.loads(Path(folder, "rows.json").read_text())
    if args.virtual:
        args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        print("\n".join("  ".join(f"{value!s:>12}" for value in row.values()) for row in rows))
        return
    starts = [asdict(start(*shape)) for shape in STARTS]
    found = {"unit": args.unit, "rows": rows, "starts": starts}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(rows, indent=1) if args.json else table([Row(**row) for row in rows]))
    for one in starts:
        print(
            f"{one['ranks']} ranks, {one['chunks']} chunks, {one['microbatches']} micro-batches: "
            f"{1e3 * one['once']:.1f} ms once, {1e6 * one['each_step']:.1f} us in every step"
        )


def start(ranks: int, chunks: int, microbatches: int, steps: int = 200) -> Start:
    """Processor time of the first rank."""
    plan = build_plan(ScheduleRequest("nanopipe"), ranks, chunks, microbatches)
    directions = Directions(None, None, tuple(range(ranks)), set(plan.channels))
    times = [time.process_time()]
    for _ in range(1 + steps):
        PeerToPeer(plan, 0, directions, lambda transfer: None)
        times.append(time.process_time())
    each = (times[-1] - times[1]) / steps
    return Start(ranks, chunks, microbatches, times[1] - times[0], each)


def table(rows: list[Row]) -> str:
    """The bubbles in percent."""
    lines = ["ranks  schedule      chunks  simulated  measured   torch"]
    for row in rows:
        mark = " " if row.torch_schedule != "our plan" else "*"
        lines.append(
            f"{row.ranks:5}  {row.schedule:12}  {row.chunks:6}  {row.simulated:9.1%}  "
            f"{row.measured:8.1%}  {row.torch:6.1%}{mark}"
        )
    return "\n".join(lines)


def _rank(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    rows = list(_virtual(ranks, args) if args.virtual else _measured(ranks, args, Path(folder)))
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _measured(ranks: int, args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    m, costs = args.microbatches, Costs(args.unit, args.unit, args.unit)
    for kind, chunks, name in SCHEDULES:
        if args.schedule and kind not in args.schedule:
            continue
        plan = build_plan(ScheduleRequest(kind=kind), ranks, chunks, m)
        price = simulate(plan, costs)
        ours = _fastest(_executor(plan, costs), args.repeats)
        theirs = _fastest(_torch_schedule(plan, costs, name, folder), args.repeats)
        yield Row(
            ranks,
            kind,
            chunks,
            m,
            price.bubble,
            1 - price.useful / ours,
            1 - price.useful / theirs,
            name or "our plan",
        )


def _virtual(ranks: int, args: argparse.Namespace) -> Iterator[VirtualRow]:
    m, paired = args.microbatches, Costs(exchange=0.5, layers=8)
    cases = [(kind, chunks, Costs()) for kind, chunks, _ in SCHEDULES]
    cases += [(kind, 1 if kind == "1f1b" else 2, paired) for kind in PAIRED]
    for kind, chunks, costs in cases:
        if args.schedule and kind not in args.schedule:
            continue
        request = ScheduleRequest(kind=kind, costs=costs, pairs=costs is paired)
        plan = build_plan(request, ranks, chunks, m)
        price = simulate(plan, costs)
        end = _virtual_end(plan, costs)
        memory = max(price.peak_memory)
        executed = 1 - price.useful / end
        yield VirtualRow(ranks, kind, chunks, m, costs.exchange, memory, price.bubble, executed)


def _virtual_end(plan: Plan, costs: Costs) -> float:
    """The last clock of all ranks."""
    rank, directions = dist.get_rank(), directions_of(dist.group.WORLD)
    directions.connect(rank, plan.channels)
    clock = VirtualTime(plan, costs)
    buffers = clock.buffers(lambda transfer: [torch.zeros(WIDTH)])
    channels = clock.channels(PeerToPeer(plan, rank, directions, buffers))
    execute(plan, rank, SleepingWork(plan, Costs(0, 0, 0)), channels, done=clock.done)
    end = torch.tensor(clock.now, dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return float(end)


def _fastest(step: Callable[[], None], repeats: int) -> float:
    """Seconds of the fastest step, from a barrier to the end of its last rank."""
    found = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(float(seconds))
    return min(found)


def _executor(plan: Plan, costs: Costs) -> Callable[[], None]:
    rank, directions = dist.get_rank(), directions_of(dist.group.WORLD)
    directions.connect(rank, plan.channels)

    def step() -> None:
        channels = PeerToPeer(plan, rank, directions, lambda transfer: [torch.zeros(WIDTH)])
        execute(plan, rank, SleepingWork(plan, costs), channels)

    return step


def _torch_schedule(plan: Plan, costs: Costs, name: str | None, folder: Path) -> Callable[[], None]:
    placement, m = plan.placement, plan.num_microbatches
    stages = []
    for number in placement.stages[dist.get_rank()]:
        # A tensor for shapes only: what takes time is the sleep.
        stage = SleepingStage(
            torch.nn.Linear(WIDTH, WIDTH), number, placement.num_stages, torch.device("cpu")
        )
        stage.plan, stage.costs = plan, Costs(0, 0, 0)
        stages.append(stage)
    options = {"n_microbatches": m, "loss_fn": lambda output, target: output.sum()}
    if name is None:
        schedule = torch_schedules._PipelineScheduleRuntime(stages, **options)
        file = folder / f"{dist.get_rank()}.csv"
        write_plan(file, plan)
        schedule._load_csv(str(file))
    else:
        single = issubclass(getattr(pipelining, name), torch_schedules.PipelineScheduleSingle)
        schedule = getattr(pipelining, name)(stages[0] if single else stages, **options)
    inputs = (torch.zeros(m, WIDTH),) if 0 in placement.stages[dist.get_rank()] else ()
    last = placement.num_stages - 1 in placement.stages[dist.get_rank()]

    def step() -> None:
        schedule.step(*inputs, target=torch.zeros(m, WIDTH) if last else None)

    step()  # exchanges shapes
    for stage in stages:
        stage.costs = costs
    return step


if __name__ == "__main__":
    main()
