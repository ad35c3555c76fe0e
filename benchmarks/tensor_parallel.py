"""Time of a product and its collective, by strategy, against the bound of perfect overlap.

    python benchmarks/tensor_parallel.py                     # CPU: two ranks and a modelled link
    python benchmarks/tensor_parallel.py --device cuda       # one rank for each GPU of this machine
    python benchmarks/tensor_parallel.py --quick

CPU: products and gloo's collectives are real work, the network is modelled: a collective is
complete when gloo has finished it and the link, which takes one call after the other, would have.
The link is as fast as makes a whole collective 0.5, 1 or 2 times the product, which is timed in the
same process. For a product of C seconds and a collective of T in n parts with a latency of a
seconds, the bound is

    n = 1: C + T + a        n > 1: max(C, T + n a) + min(C, T + n a) / n

``overhead`` is the time beyond C that the same program takes over a link without delay: on a CPU
gloo's copies and sums share the cores with the product.

GPU: NCCL, plain and in parts, our fused strategy, and torch's own operators over symmetric memory.

Times are the fastest of the repeats. Writes FILE.json and FILE.png.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work

from mindspeed.processes import free_port
from mindspeed.te import kernels
from mindspeed.tensor_parallel.products import OverlappedProducts
from mindspeed.tensor_parallel.strategy import OPERATIONS, Overlap

RATIOS, PARTS, LATENCY = (0.5, 1.0, 2.0), (1, 2, 4, 8), 5e-4
MEASURED = ("matmul_scatter", "gather_matmul")
CPU_SHAPE, CPU_RANKS = (768, 1024, 1024), 2
GPU_SHAPES = ((4096, 8192, 8192), (16384, 8192, 8192))  # Llama-2-70B: attention output


@dataclass(frozen=True)
class Row:
    """One strategy of one product; seconds."""

    operation: str
    shape: tuple[int, int, int]
    strategy: str
    seconds: float
    ratio: float | None = None
    bound: float | None = None
    overhead: float | None = None


class DelayedWork(Work):
    """A collective that is not complete before its time."""

    def __init__(self, inner: Work, due: float) -> None:
        super().__init__()
        self._inner, self._due = inner, due

    def wait(self, timeout: Any = None) -> bool:
        """Wait for gloo, then for the link."""
        self._inner.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return True


class LinkGroup(ProcessGroup):
    """Gloo behind a link that takes one call after the other.

    Attributes:
        latency: seconds of each call.
        seconds_per_byte: of what this rank sends.
    """

    latency = seconds_per_byte = 0.0

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._free_at = 0.0

    def getBackendName(self) -> str:
        """Its name in ``init_process_group``."""
        return "link"

    def _delayed(self, work: Work, sent: int) -> DelayedWork:
        start = max(time.perf_counter(), self._free_at)
        self._free_at = start + self.latency + self.seconds_per_byte * sent
        return DelayedWork(work, self._free_at)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> DelayedWork:
        work = self._gloo._allgather_base(output, given, opts)
        return self._delayed(work, (self.size() - 1) * given.nbytes)

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> DelayedWork:
        work = self._gloo._reduce_scatter_base(output, given, opts)
        return self._delayed(work, (self.size() - 1) * output.nbytes)

    def barrier(self, opts: Any = None) -> Work:
        """Not delayed."""
        return self._gloo.barrier(opts)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base


def main() -> None:
    """Measure on all ranks, print and write what rank 0 found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="one small product, two repeats")
    parser.add_argument("--out", type=Path, default=Path("tensor_parallel"), help="without suffix")
    args = parser.parse_args()
    ranks = CPU_RANKS if args.device == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        parser.error("--device cuda needs two GPUs or more: their memory is what is measured")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    mp.spawn(_rank, (ranks, args), nprocs=ranks)


def _rank(rank: int, ranks: int, args: argparse.Namespace) -> None:
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.Backend.register_backend("link", LinkGroup, devices=["cpu"])
        dist.init_process_group("link", rank=rank, world_size=ranks)
        rows = list(_over_a_link(args))
    else:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=ranks)
        rows = list(_on_gpus(args))
    if rank == 0:
        report(rows, args.out)
    dist.barrier()
    dist.destroy_process_group()


def _over_a_link(args: argparse.Namespace) -> Iterator[Row]:
    shape = (64, 64, 64) if args.quick else CPU_SHAPE
    repeats, ranks = 2 if args.quick else args.repeats, dist.get_world_size()
    m, k, n = shape
    x, weight = torch.randn(m, 1, k), torch.randn(n, k)
    product = timed(lambda: torch.mm(x[:, 0], weight.t()))
    calibrated = least(min(product() for _ in range(4 * repeats)))
    computing = calibrated
    runs: dict[tuple[str, int, float], Callable[[], float]] = {}
    for name in MEASURED:
        sent = (ranks - 1) * m * (n if name == "matmul_scatter" else k) * 4 // ranks
        given = x if name == "matmul_scatter" else x[: m // ranks]
        for parts in PARTS:
            run = timed(_strategy(name, Overlap(parts=parts), given, weight))
            for ratio in (0.0, *RATIOS):
                runs[name, parts, ratio] = _behind(ratio * calibrated / sent, run)
    best = {key: float("inf") for key in runs}
    for _ in range(repeats):  # in turn, so that a busy moment meets all alike
        computing = min(computing, product())
        for key, run in runs.items():
            best[key] = min(best[key], run())
    for (name, parts, ratio), seconds in best.items():
        if ratio:
            overhead = best[name, parts, 0.0] - computing
            bound = bound_of(computing, ratio * calibrated, parts)
            yield Row(name, shape, f"{parts} parts", seconds, ratio, bound, overhead)


def least(seconds: float) -> float:
    """The least of all ranks."""
    found = torch.empty(dist.get_world_size(), dtype=torch.float64)
    given = torch.tensor([seconds], dtype=torch.float64)
    dist.all_gather_into_tensor(found, given)
    return float(found.min())


def _behind(seconds_per_byte: float, run: Callable[[], float]) -> Callable[[], float]:
    """The same over a link; 0 for no delay."""

    def delayed() -> float:
        LinkGroup.seconds_per_byte = seconds_per_byte
        LinkGroup.latency = LATENCY if seconds_per_byte else 0.0
        return run()

    return delayed


def bound_of(computing: float, sending: float, parts: int) -> float:
    """Seconds of a product and its collective that overlap perfectly."""
    sending += parts * LATENCY
    if parts == 1:
        return computing + sending
    return max(computing, sending) + min(computing, sending) / parts


def _on_gpus(args: argparse.Namespace) -> Iterator[Row]:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    for m, k, n in GPU_SHAPES[:1] if args.quick else GPU_SHAPES:
        for name in MEASURED:
            scatters = name == "matmul_scatter"
            into, out = (k // ranks, n) if scatters else (k, n // ranks)
            rows = m if scatters else m // ranks
            x = torch.randn(rows, 1, into, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(out, into, device="cuda", dtype=torch.bfloat16)
            ways: dict[str, Callable[[], Any]] = {
                f"{parts} parts": _strategy(name, Overlap(parts=parts), x, weight)
                for parts in PARTS
            }
            ways["fused"] = _strategy(name, Overlap(fused=True), x, weight)
            ways["torch's operator"] = _operator_of_torch(scatters, x[:, 0], weight.t(), group)
            for way, run in ways.items():
                seconds = timed(run)
                best = min(seconds() for _ in range(args.repeats))
                yield Row(name, (m, into, out), way, best)


def _operator_of_torch(
    scatters: bool, a: torch.Tensor, b: torch.Tensor, group: Any
) -> Callable[[], Any]:
    if scatters:
        reduce = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return lambda: reduce(a, b, "sum", 0, group.group_name)
    gather = torch.ops.symm_mem.fused_all_gather_matmul
    return lambda: gather(a, [b], 0, group.group_name, return_A=False)


def _strategy(
    name: str, overlap: Overlap, x: torch.Tensor, weight: torch.Tensor
) -> Callable[[], Any]:
    plain = {operation: getattr(kernels, operation) for operation in OPERATIONS}
    product = OverlappedProducts(overlap, plain).kernels()[name]
    return lambda: product(x, weight, dist.group.WORLD)


def timed(run: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that runs it and returns the seconds; ranks start together."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def measure() -> float:
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - begin

    run()  # caches, connections
    return measure


def report(rows: list[Row], out: Path) -> None:
    """Print a table, write JSON and a picture."""
    for row in rows:
        text = f"{row.operation:<15}{row.shape!s:<22}{row.strategy:<17}{row.seconds * 1e3:9.2f} ms"
        if row.ratio is not None and row.bound and row.overhead is not None:
            text += f"   T/C {row.ratio:<4} bound {row.bound * 1e3:8.2f}"
            text += f"   overhead {row.overhead * 1e3:7.2f}"
        print(text)
    figures = {"latency": LATENCY, "rows": [asdict(row) for row in rows]}
    out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(rows, out.with_suffix(".png"))


def draw(rows: list[Row], file: Path) -> None:
    """Measured time and bound by number of parts, or bars of the strategies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, name in zip(axes, MEASURED, strict=True):
        chosen = [row for row in rows if row.operation == name]
        axis.set_title(name)
        axis.grid(alpha=0.3)
        if chosen[0].ratio is None:
            labels = [f"{row.strategy}\n{row.shape[0]}" for row in chosen]
            axis.bar(labels, [row.seconds * 1e3 for row in chosen])
            axis.tick_params(axis="x", labelsize=6, rotation=90)
            continue
        for color, ratio in zip(("tab:blue", "tab:orange", "tab:green"), RATIOS, strict=True):
            line = [row for row in chosen if row.ratio == ratio]
            measured, bounds = (
                [getattr(row, what) * 1e3 for row in line] for what in ("seconds", "bound")
            )
            label = f"collective = {ratio} products"
            axis.plot(PARTS, measured, "o-", color=color, label=label)
            axis.plot(PARTS, bounds, "--", color=color)
        axis.set_xscale("log", base=2)
        axis.set_xticks(PARTS, PARTS)
        axis.set_xlabel("parts (dashed: perfect overlap)")
    axes[0].set_ylabel("ms")
    if rows[0].ratio is not None:
        axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
