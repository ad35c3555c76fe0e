"""Kernel time and traffic of every context-parallel algorithm, all ranks in one process.

    python benchmarks/attention.py --device cpu                          # 4096 tokens, 8 ranks
    python benchmarks/attention.py --device cuda --tokens 65536 --dtype bf16
    python benchmarks/attention.py --device cpu --quick                  # seconds, for CI

The ranks of a plan take turns on one device, in lock-step, with everything that a real rank does
but the sending: packing, operator calls, merging, adding up gradients. A rank's time is what it
would wait for if nothing had to travel. For each mask and algorithm:

    balance         mean over largest time of a rank (of the work: mean over largest area)
    efficiency      time of one process / (ranks * largest time of a rank)
    MiB received    of the worst rank, forward and backward, as the plan says

One process is torch's scaled_dot_product_attention, document by document (for windows, which it
knows only as a mask, our operator). "torch ring" is the ring of zigzag chunks that torch's
context_parallel and ring-flash-attention run, as calls of torch's flash operator and its merge, for
the causal mask. On the CPU times are processor times of one thread, the fastest of the repeats.

Writes FILE.json and, when matplotlib is installed, FILE.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from mindspeed.attention import Mask, Plan, Sizes, cost_metrics, executor, plan, zigzag
from mindspeed.attention.communication import run_in_one_process
from mindspeed.attention.cost_metrics import calls_per_stage
from mindspeed.attention.kernels import SoftmaxOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALGORITHMS = ("ring", "all_gather", "needed", "adaptive", "mesh", "ulysses")
ONE, TORCH_RING = "one process", "torch ring"
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One algorithm on one mask; times in milliseconds, one for each rank."""

    mask: str
    algorithm: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    efficiency: float
    balance: float
    balance_of_work: float
    mebibytes_received: float
    calls: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write its files."""
    options = parse(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    rows: list[Row] = []
    with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is written
        for name, mask in tqdm(masks(options).items(), unit="mask", disable=None):
            rows += measure(name, mask, options)
    print_table(rows)
    write(rows, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu")
    parser.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="key heads")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, help="default: CPU fp32, else bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a short sequence, once")
    parser.add_argument("--out", type=Path, help="files without ending; default: DEVICE-attention")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.ranks, options.heads, options.repeats = 256, 4, 4, 1
        options.groups = 2
    if options.heads % options.ranks:
        parser.error("--heads must be divisible by --ranks: Ulysses gives every rank as many")
    options.dtype = options.dtype or ("fp32" if options.device == "cpu" else "bf16")
    options.out = options.out or Path(f"{options.device}-attention")
    return options


def masks(options: argparse.Namespace) -> dict[str, Mask]:
    """The masks by name."""
    size, generator = options.tokens, random.Random(1)
    cu_seqlens = [0]
    while cu_seqlens[-1] < size:  # many short documents, some long ones
        length = int(size / 256 * 2 ** (7 * generator.random()))
        cu_seqlens.append(min(size, cu_seqlens[-1] + max(length, 1)))
    few = (0, size * 5 // 8, size * 6 // 8, size)
    return {
        "causal": Mask.causal(size),
        f"{len(cu_seqlens) - 1} documents": Mask.documents(cu_seqlens),
        "3 documents": Mask.documents(few),
        f"window {size // 16}": Mask.causal(size, size // 16),
    }


def measure(name: str, mask: Mask, options: argparse.Namespace) -> Iterator[Row]:
    """All algorithms on one mask, in turns, the fastest of the repeats."""
    plans = {one: plan_of(one, mask, options) for one in ALGORITHMS}
    contenders: dict[str, Callable[[], Any]] = {
        one: lambda one=one: run(plans[one], options, one) for one in ALGORITHMS
    }
    contenders[ONE] = lambda: one_process(mask, options)
    if name == "causal" and options.device != "npu":  # torch has its kernels elsewhere only
        contenders[TORCH_RING] = lambda: torch_ring(options)
    best: dict[str, list[list[float]]] = {}
    for _ in range(options.repeats + 1):  # once to warm up
        for one, contender in contenders.items():
            times = [list(x) for x in contender()]
            before = best.get(one, times)
            best[one] = [
                [min(a, b) for a, b in zip(*both, strict=True)]
                for both in zip(before, times, strict=True)
            ]
    (alone,), (alone_back,) = best.pop(ONE)
    yield Row(name, ONE, (alone,), (alone_back,), 1.0, 1.0, 1.0, 0.0, 1)
    for one, (forward, backward) in best.items():
        both = [a + b for a, b in zip(forward, backward, strict=True)]
        price = None if one == TORCH_RING else cost_metrics(plans[one])
        yield Row(
            name,
            one,
            tuple(forward),
            tuple(backward),
            (alone + alone_back) / options.ranks / max(both),
            sum(both) / len(both) / max(both),
            1.0 if price is None else price.balance,
            received(one, plans, options) / 2**20,
            0 if price is None else max(map(sum, zip(*calls_per_stage(plans[one]), strict=True))),
        )


def plan_of(algorithm: str, mask: Mask, options: argparse.Namespace) -> Plan:
    """The plan of all ranks; of Ulysses the plan of the one rank that is left."""
    if algorithm == "ulysses":
        return plan(mask, 1, "ring")
    granularity = max(options.tokens // 1024, 1)
    extra = {"granularity": granularity} if algorithm == "adaptive" else {}
    return plan(mask, options.ranks, algorithm, **extra)


def received(algorithm: str, plans: dict[str, Plan], options: argparse.Namespace) -> int:
    """Bytes that the worst rank receives in both passes."""
    itemsize = DTYPES[options.dtype].itemsize
    sizes = Sizes(options.heads, options.groups, options.head_size, options.head_size, itemsize)
    ranks, rows = options.ranks, options.tokens // options.ranks
    if algorithm == "ulysses":
        keys = sizes.row * max(1, ranks // options.groups)
        return 2 * (ranks - 1) * rows * (2 * sizes.query_row + keys) // ranks
    if algorithm == TORCH_RING:  # gradients travel in fp32, all the way round
        width = 2 * options.groups * options.head_size
        return rows * width * ((ranks - 1) * 2 * itemsize + ranks * 4)
    price = cost_metrics(plans[algorithm])
    both = zip(price.forward_bytes(sizes), price.backward_bytes(sizes), strict=True)
    return max(map(sum, both))


def tensors(options: argparse.Namespace, heads: int, groups: int) -> Tensors:
    """Queries, keys, values and an output gradient of the whole sequence ``[t, n, d]``."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(options.tokens, n, options.head_size, generator=generator).to(
            options.device, DTYPES[options.dtype]
        )
        for n in (heads, groups, groups, heads)
    )


def run(one: Plan, options: argparse.Namespace, algorithm: str) -> tuple[list[float], list[float]]:
    """Milliseconds of every rank, forward and backward."""
    heads, groups = options.heads, options.groups
    if algorithm == "ulysses":
        heads, groups = heads // options.ranks, max(groups // options.ranks, 1)
    *qkv, dout = tensors(options, heads, groups)
    softmax = SoftmaxOptions(options.head_size**-0.5)
    rows = [one.sharding.positions(rank).to(options.device) for rank in range(one.ranks)]
    mine = [tuple(x[index] for x in qkv) for index in rows]
    clocks = [Clock(options.device) for _ in range(2 * one.ranks)]
    forward = run_in_one_process(
        [
            clocks[rank].timed(executor.forward(one, rank, *mine[rank], softmax=softmax))
            for rank in range(one.ranks)
        ]
    )
    run_in_one_process(
        [
            clocks[one.ranks + rank].timed(
                executor.backward(
                    one, rank, dout[rows[rank]], *mine[rank], *forward[rank], softmax=softmax
                )
            )
            for rank in range(one.ranks)
        ]
    )
    spent = [clock.milliseconds for clock in clocks]
    return spent[: one.ranks], spent[one.ranks :]


class Clock:
    """Adds up time: of the processor, or of a device that runs asynchronously."""

    def __init__(self, device: str) -> None:
        self.device, self.milliseconds, self._start = device, 0.0, 0.0

    def _now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        getattr(torch, self.device).synchronize()
        return time.perf_counter()

    def __enter__(self) -> Clock:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.milliseconds += 1e3 * (self._now() - self._start)

    def timed(self, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same generator, its own time counted and not that of whoever drives it."""
        answer = None
        while True:
            with self:
                try:
                    asked = steps.send(answer)
                except StopIteration as end:
                    return end.value
            answer = yield asked


def one_process(mask: Mask, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The whole sequence by torch, or by our operator where torch would need a mask tensor."""
    if any(region.lo > -options.tokens for region in mask.regions):
        return run(plan(mask, 1, "ring"), options, ONE)
    *qkv, dout = tensors(options, options.heads, options.groups)
    cu_seqlens = [0, *(region.q1 for region in mask.regions)]
    times = Clock(options.device), Clock(options.device)
    for a, b in pairwise(cu_seqlens):
        q, k, v, grad = (x[None, a:b].transpose(1, 2) for x in (*qkv, dout))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with times[0]:
            out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        with times[1]:
            out.backward(grad)
    return [times[0].milliseconds], [times[1].milliseconds]


def torch_ring(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Steps of a zigzag ring by torch's flash operator."""
    share = options.heads // options.groups
    *qkv, dout = tensors(options, options.heads, options.groups)
    layout, ranks = zigzag(options.tokens, options.ranks), options.ranks
    parts = [
        [x[layout.positions(rank).to(options.device)][None].transpose(1, 2) for x in (*qkv, dout)]
        for rank in range(ranks)
    ]
    half = options.tokens // ranks // 2
    flash, flash_back = FLASH[options.device]
    forward, backward = [], []
    for rank, (q, _, _, grad) in enumerate(parts):
        steps = [(k, rank - k) for k in ((rank - t) % ranks for t in range(ranks))]

        def operands(k: int, ahead: int) -> tuple[slice, Tensors, bool]:
            keys, values = (x.repeat_interleave(share, 1) for x in parts[k][1:3])
            if ahead > 0:
                keys, values = keys[:, :, :half], values[:, :, :half]
            return slice(half if ahead < 0 else 0, None), (keys, values), ahead == 0

        with Clock(options.device) as clock:
            wide = torch.zeros_like(q, dtype=torch.float32)
            lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
            for step in steps:
                rows, keys, causal = operands(*step)
                part, part_lse = flash(q[:, :, rows], *keys, causal)
                both = torch.logaddexp(lse[:, :, rows], part_lse)
                old, new = (lse[:, :, rows] - both).exp(), (part_lse - both).exp()
                wide[:, :, rows] = wide[:, :, rows] * old[..., None] + part * new[..., None]
                lse[:, :, rows] = both
            out = wide.to(q.dtype)
        forward.append(clock.milliseconds)
        with Clock(options.device) as clock:
            dq = torch.zeros_like(wide)
            sums = [torch.zeros_like(x, dtype=torch.float32) for x in parts[rank][1:3]]
            for step in steps:
                rows, keys, causal = operands(*step)
                given = (x[:, :, rows] for x in (grad, q))
                grads = flash_back(*given, *keys, out[:, :, rows], lse[:, :, rows], causal)
                dq[:, :, rows] += grads[0]
                for total, x in zip(sums, grads[1:], strict=True):
                    total[:, :, : x.shape[2]] += x.unflatten(1, (-1, share)).sum(2)
        backward.append(clock.milliseconds)
    return forward, backward


def _cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_flash_back(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, causal: bool,
) -> Tensors:  # fmt: skip
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal
    )


def _cuda_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False
    )
    return out.transpose(1, 2), lse


def _cuda_flash_back(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, causal: bool,
) -> Tensors:  # fmt: skip
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal,
        state, state[:0],
    )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in grads)


FLASH = {"cpu": (_cpu_flash, _cpu_flash_back), "cuda": (_cuda_flash, _cuda_flash_back)}


def print_table(rows: Sequence[Row]) -> None:
    """One line for each mask and algorithm."""
    head = (
        "mask",
        "algorithm",
        "ms fwd",
        "ms bwd",
        "efficiency",
        "balance",
        "work",
        "MiB",
        "calls",
    )
    lines = [
        (
            row.mask, row.algorithm, f"{max(row.forward):.1f}", f"{max(row.backward):.1f}",
            f"{row.efficiency:.2f}", f"{row.balance:.2f}", f"{row.balance_of_work:.3f}",
            f"{row.mebibytes_received:.1f}", str(row.calls),
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write the JSON file and the picture."""
    about = {
        "device": options.device, "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__, "tokens": options.tokens, "ranks": options.ranks,
        "heads": options.heads, "groups": options.groups, "head_size": options.head_size,
        "dtype": options.dtype, "repeats": options.repeats,
        "clock": "processor time of one thread" if options.device == "cpu" else "wall",
    }  # fmt: skip
    if options.device != "cpu":
        about["processor"] = getattr(torch, options.device).get_device_name()
    document = {"conditions": about, "rows": [asdict(row) for row in rows]}
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    draw(rows, about, options.out.with_suffix(".png"))


def draw(rows: Sequence[Row], about: dict[str, Any], path: Path) -> None:
    """Efficiency and traffic of every algorithm, one group of bars for each mask."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.mask for row in rows))
    kinds = [one for one in dict.fromkeys(row.algorithm for row in rows) if one != ONE]
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    for axis, field, label in (
        (axes[0], "efficiency", "time of one process /\n(ranks x slowest rank)"),
        (axes[1], "mebibytes_received", "MiB received by the worst\nrank, both passes"),
    ):
        for number, kind in enumerate(kinds):
            found = [(names.index(r.mask), getattr(r, field)) for r in rows if r.algorithm == kind]
            places = [at + 0.8 * (number / len(kinds) - 0.5) for at, _ in found]
            axis.bar(places, [value for _, value in found], 0.8 / len(kinds), label=kind)
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
    axes[0].axhline(1, color="black", linewidth=0.8)
    axes[0].legend(ncols=4, fontsize="small")
    axes[1].set_xticks(range(len(names)), names)
    figure.suptitle(
        f"{about['tokens']} tokens, {about['ranks']} ranks, {about['heads']} heads, "
        f"{about['groups']} key heads, {about['dtype']}, {about['device']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
