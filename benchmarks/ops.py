"""Time of every operator against torch eager, torch.compile and liger-kernel, in one run.

    python benchmarks/ops.py --device cuda                              # hidden 1024 to 16384
    python benchmarks/ops.py --device cpu --hidden 1024 4096 --operator rms_norm swiglu
    python benchmarks/ops.py --device cpu --quick                       # seconds, for CI

For each operator with a realistic workload it reports the time, the bytes it must move (inputs and
outputs once, what it writes into twice) over that time, that rate as a fraction of what
``torch.clone`` of as many bytes reaches in the same run, and TFLOP/s where the operator has a FLOP
formula. All contenders take turns. On a GPU or NPU the times are those of events around one call,
the median, with the L2 cache overwritten before each; what the host needs to queue it is apart. On
the CPU they are the fastest of the repeats. The table shows the ratio to torch eager of the same
formula, forward and backward.

Writes FILE.csv, FILE.json and, when matplotlib is installed, FILE.png.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ops_peers import PEERS, BackwardPeer, has_liger
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from mindspeed.ops.catalog import operators
from mindspeed.ops.registry import Operator

Call = Callable[[], Any]
Times = tuple[dict[str, float], dict[str, float]]  # seconds of a call; the host's part of it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONTENDERS = ("mindspeed", "eager", "compile", "liger")
L2_BYTES = 256 << 20  # more than any cache
OVERWRITES = 16  # of the cache: a millisecond, in which the host queues a call's kernels


@dataclass(frozen=True)
class Row:
    """One contender's figures for one operator, dtype and hidden size."""

    operator: str
    dtype: str
    hidden: int
    contender: str
    milliseconds: float
    host_microseconds: float | None
    gigabytes_per_second: float
    fraction_of_clone: float
    teraflops: float | None
    speed_over_eager: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write its files."""
    options = parse(arguments)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    if options.device == "npu":
        import torch_npu  # noqa: F401
    cases = list(choose(options))
    rows: list[Row] = []
    with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is written
        for operator, dtype, hidden in tqdm(cases, unit="case", disable=None):
            try:
                rows += measure(operator, dtype, hidden, options)
            except torch.OutOfMemoryError as error:
                tqdm.write(f"{operator.name} {dtype} hidden {hidden}: {str(error).splitlines()[0]}")
            gc.collect()
            gc.freeze()  # modules and results: the next collection looks at its own case only
    print_table(rows)
    write(rows, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line and fill in what depends on the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), required=True)
    parser.add_argument("--operator", nargs="+", help="names; default: all with a workload")
    parser.add_argument("--hidden", nargs="+", type=int, help="default: 1024 to 16384, CPU 4096")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: bf16, CPU also fp32")
    parser.add_argument(
        "--against", nargs="+", choices=CONTENDERS[1:], help="default: all that run; CPU: eager"
    )
    parser.add_argument("--repeats", type=int, help="timed calls; default: 200, CPU 15")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; default: 1")
    parser.add_argument("--quick", action="store_true", help="small sizes, three calls")
    parser.add_argument("--out", type=Path, help="files without ending; default: ops-DEVICE")
    options = parser.parse_args(arguments)
    cpu = options.device == "cpu"
    sizes = [256] if options.quick else [4096] if cpu else [1024, 2048, 4096, 8192, 16384]
    options.hidden = options.hidden or sizes
    options.dtype = options.dtype or (["fp32", "bf16"] if cpu else ["bf16"])
    options.against = options.against or (["eager"] if cpu else list(CONTENDERS[1:]))
    options.repeats = options.repeats or (3 if options.quick else 15 if cpu else 200)
    options.out = options.out or Path(f"ops-{options.device}")
    known = {one.name for one in operators() if one.workload}
    unknown = set(options.operator or ()) - known
    if unknown:
        parser.error(f"--operator: no workload for {', '.join(sorted(unknown))}; "
                     f"there are {', '.join(sorted(known))}")  # fmt: skip
    return options


def choose(options: argparse.Namespace) -> Iterator[tuple[Operator, str, int]]:
    """Every operator, dtype and hidden size that is selected."""
    for operator in operators():
        if operator.workload is None or operator.name not in (options.operator or [operator.name]):
            continue
        for dtype in options.dtype:
            if DTYPES[dtype] in operator.dtypes:
                for hidden in options.hidden:
                    yield operator, dtype, hidden


def measure(
    operator: Operator, dtype: str, hidden: int, options: argparse.Namespace
) -> Iterator[Row]:
    """Time all contenders of one case."""
    assert operator.workload is not None
    arguments = operator.workload(hidden, DTYPES[dtype], options.device)
    moved, flops = bytes_moved(operator, arguments), count_flops(operator, arguments)
    buffer = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=options.device).fill_(1)
    calls: dict[str, Call] = {"clone": buffer.clone, "mindspeed": lambda: operator(*arguments)}
    for name in options.against:
        try:
            call = contender(name, operator, arguments)
        except Exception as error:  # a peer that cannot run here is no reason to stop
            tqdm.write(f"{operator.name}: {name} does not run: {str(error).splitlines()[0]}")
            continue
        if call is not None:
            calls[name] = call
    timer = time_on_host if options.device == "cpu" else time_on_device
    times, host = timer(calls, options)
    clone = moved / times["clone"]
    for name in CONTENDERS:
        if name in times:
            rate, eager = moved / times[name], times.get("eager")
            yield Row(
                operator=operator.name,
                dtype=dtype,
                hidden=hidden,
                contender=name,
                milliseconds=times[name] * 1e3,
                host_microseconds=host[name] * 1e6 if name in host else None,
                gigabytes_per_second=rate / 1e9,
                fraction_of_clone=rate / clone,
                teraflops=flops / times[name] / 1e12 if flops else None,
                speed_over_eager=None if eager is None else eager / times[name],
            )


def contender(name: str, operator: Operator, arguments: tuple[Any, ...]) -> Call | None:
    """What to time for a peer, or None when it has no such operator."""
    peer = PEERS.get(operator.name)
    if peer is None:
        return None
    if name == "liger":
        return peer.liger(*arguments) if peer.liger and has_liger() else None
    if name == "eager":
        return peer.call(arguments, lambda formula: formula)
    # A backward that is run again needs what the compiled forward kept.
    with torch._functorch.config.patch(donated_buffer=False):
        call = peer.call(arguments, lambda f: torch.compile(f, fullgraph=True, dynamic=False))
        call()
    return call


def bytes_moved(operator: Operator, arguments: tuple[Any, ...]) -> int:
    """Inputs and outputs once, arguments that are written to twice."""
    outputs = operator(*arguments)
    written = [arguments[i] for i in operator.mutated()]
    tensors = [x for x in tree_leaves((arguments, outputs, written)) if torch.is_tensor(x)]
    return sum(x.numel() * x.element_size() for x in tensors)


def count_flops(operator: Operator, arguments: tuple[Any, ...]) -> int:
    """Floating-point operations of operators with a formula, else 0."""
    with FlopCounterMode(display=False) as counter:
        operator(*arguments)
    return counter.get_total_flops()


def time_on_host(calls: dict[str, Call], options: argparse.Namespace) -> Times:
    """Seconds of the fastest call; contenders take turns, so that a busy moment hits all."""
    best = dict.fromkeys(calls, float("inf"))
    for repeat in range(options.repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if repeat:  # the first turn warms up
                best[name] = min(best[name], elapsed)
    return best, {}


def time_on_device(calls: dict[str, Call], options: argparse.Namespace) -> Times:
    """Seconds between events around one call, and of the host in it: medians.

    The cache holds something else, and the device is busy until the host has queued the call: what
    the host needs is not part of the device's time.
    """
    device: Any = getattr(torch, options.device)
    cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=options.device)
    for call in calls.values():
        for _ in range(1 + options.repeats // 2):
            call()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    queued: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.repeats):
        for name, call in calls.items():
            start, end = (device.Event(enable_timing=True) for _ in range(2))
            for _ in range(OVERWRITES):
                cache.zero_()
            start.record()
            began = time.perf_counter()
            call()
            queued[name].append(time.perf_counter() - began)
            end.record()
            events[name].append((start, end))
    device.synchronize()
    on_device = {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3
        for name, pairs in events.items()
    }
    return on_device, {name: statistics.median(times) for name, times in queued.items()}


def print_table(rows: list[Row]) -> None:
    """One line a case and contender, then the operators that torch eager beats."""
    head = f"{'operator':<36}{'dtype':<6}{'hidden':>7} {'contender':<10}"
    print(head + f"{'ms':>10}{'host us':>9}{'GB/s':>9}{'of clone':>9}{'TFLOP/s':>9}{'eager/it':>9}")
    for row in rows:
        flops = "" if row.teraflops is None else f"{row.teraflops:.2f}"
        host = "" if row.host_microseconds is None else f"{row.host_microseconds:.0f}"
        ratio = "" if row.speed_over_eager is None else f"{row.speed_over_eager:.2f}"
        print(
            f"{row.operator:<36}{row.dtype:<6}{row.hidden:>7} {row.contender:<10}"
            f"{row.milliseconds:>10.3f}{host:>9}{row.gigabytes_per_second:>9.1f}"
            f"{row.fraction_of_clone:>9.2f}{flops:>9}{ratio:>9}"
        )
    both = both_ways(rows)
    for (operator, dtype, hidden), ratio in both.items():
        print(
            f"{operator:<36}{dtype:<6}{hidden:>7} eager over it, with its backward {ratio:>25.2f}"
        )
    slower = [f"{' '.join(map(str, case))} ({r:.2f})" for case, r in both.items() if r < 1]
    print(f"slower than torch eager of the same formula: {', '.join(slower) or 'none'}")
    alone = {row.operator for row in rows if row.speed_over_eager is None}
    if alone:
        print(f"without a formula to compare with: {', '.join(sorted(alone))}")


def both_ways(rows: list[Row]) -> dict[tuple[str, str, int], float]:
    """Time of torch eager over the operator's: forward, plus backward where there is one."""
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in rows:
        peer = PEERS.get(row.operator)
        family = peer.of if isinstance(peer, BackwardPeer) else row.operator
        total = times.setdefault((family, row.dtype, row.hidden), dict.fromkeys(CONTENDERS, 0.0))
        total[row.contender] += row.milliseconds
    return {
        case: total["eager"] / total["mindspeed"] for case, total in times.items() if total["eager"]
    }


def write(rows: list[Row], options: argparse.Namespace) -> None:
    """Write the rows as CSV, with their circumstances as JSON, and as a picture."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records = [asdict(row) for row in rows]
    with open(options.out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, Row.__dataclass_fields__)
        writer.writeheader()
        writer.writerows(records)
    document = {
        "device": device_name(options.device),
        "torch": torch.__version__,
        "repeats": options.repeats,
        "threads": options.threads if options.device == "cpu" else None,
        "rows": records,
    }
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    written = ["csv", "json"]
    if rows and draw(rows, document["device"], options.out.with_suffix(".png")):
        written.append("png")
    print(f"wrote {options.out}.{{{','.join(written)}}}")


def device_name(device: str) -> str:
    """What the times were taken on."""
    if device == "cpu":
        return platform.processor() or platform.machine()
    return getattr(torch, device).get_device_name()


def draw(rows: list[Row], device: str, path: Path) -> bool:
    """One panel an operator and dtype: fraction of the clone's rate, or TFLOP/s, over hidden."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    panels = list(dict.fromkeys((row.operator, row.dtype) for row in rows))
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        of_panel = [row for row in rows if (row.operator, row.dtype) == panel]
        in_flops = of_panel[0].teraflops is not None
        for name in CONTENDERS:
            line = [row for row in of_panel if row.contender == name]
            figures = [row.teraflops if in_flops else row.fraction_of_clone for row in line]
            axis.plot([row.hidden for row in line], figures, marker="o", label=name)
        axis.set(title=" ".join(panel), xlabel="hidden", xscale="log")
        axis.set_ylabel("TFLOP/s" if in_flops else "bytes/s, as a fraction of clone")
        axis.set_ylim(bottom=0)
        axis.set_xticks(sizes := sorted({row.hidden for row in of_panel}), map(str, sizes))
        axis.minorticks_off()
    axes.flat[0].legend()
    figure.suptitle(f"Operators on {device}, torch {torch.__version__}")
    figure.savefig(path, dpi=100)
    return True


if __name__ == "__main__":
    main()
