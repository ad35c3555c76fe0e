"""Measure the rates of this process's device: matrix products, copies, attention, launches.

Times are medians of samples (:class:`Stopwatch`), with their interquartile range.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product as combinations
from math import ceil
from statistics import median, quantiles

import torch

from mindspeed.device.base import Device as Hardware
from mindspeed.errors import ConfigError
from mindspeed.planner.cluster import GIB, Device, MeasuredProduct
from mindspeed.planner.cluster.operations import DTYPES

WARM_UP, MOST_LOOPS = 2, 1000


@dataclass(frozen=True)
class Timing:
    """Seconds of one run.

    Attributes:
        seconds: median.
        spread: interquartile range relative to the median.
    """

    seconds: float
    spread: float


@dataclass(frozen=True)
class Stopwatch:
    """Times work on a device.

    Attributes:
        synchronize: waits for the device.
        seconds: minimum duration of a sample.
        agree: makes the number of runs equal on all participating ranks.
    """

    synchronize: Callable[[], None]
    samples: int = 7
    seconds: float = 0.01
    agree: Callable[[int], int] = int
    now: Callable[[], float] = time.perf_counter

    def time(self, run: Callable[[], object]) -> Timing:
        """Time a function, which may launch work on the device without waiting for it."""
        for _ in range(WARM_UP):
            run()
        once = max(self._sample(run, 1), 1e-9)
        loops = self.agree(min(MOST_LOOPS, ceil(self.seconds / once)))
        return of_samples([self._sample(run, loops) / loops for _ in range(self.samples)])

    def _sample(self, run: Callable[[], object], loops: int) -> float:
        self.synchronize()
        start = self.now()
        for _ in range(loops):
            run()
        self.synchronize()
        return self.now() - start


def of_samples(samples: Sequence[float]) -> Timing:
    """Median and spread of samples."""
    middle = median(samples)
    if len(samples) < 2 or not middle:
        return Timing(middle, 0.0)
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Timing(middle, (high - low) / middle)


NAMES = {name: dtype for dtype, name in DTYPES.items() if name in ("bf16", "fp16", "fp32")}
"""Dtypes of products that can be measured, by name."""
HEADS, HEAD_SIZE = 8, 128
TINY_CALLS = 50


def sizes_of_products(largest: int) -> Iterator[tuple[int, int, int]]:
    """Yield sizes ``(m, n, k)`` from an eighth of ``largest`` to all of it, and thin ones."""
    steps = [max(1, largest // part) for part in (8, 4, 2, 1)]
    yield from combinations(steps, steps[1:], steps[1:])
    thin = max(1, largest // 64)
    yield from ((largest, thin, largest), (thin, largest, largest), (largest, largest, thin))


def measure_products(
    hardware: Hardware, watch: Stopwatch, dtypes: Sequence[str], largest: int
) -> list[MeasuredProduct]:
    """Time a grid of products.

    Args:
        dtypes: names of :data:`NAMES`.
        largest: rows and columns of the largest matrix.

    Raises:
        ConfigError: a dtype cannot be measured.
    """
    found, where = [], hardware.torch_device()
    for name in dtypes:
        if name not in NAMES:
            raise ConfigError(f"--dtypes {name}: allowed are {', '.join(sorted(NAMES))}")
        for m, n, k in sizes_of_products(largest):
            left = torch.ones(m, k, dtype=NAMES[name], device=where)
            right = torch.ones(k, n, dtype=NAMES[name], device=where)
            result = torch.empty(m, n, dtype=NAMES[name], device=where)
            timing = watch.time(partial(torch.mm, left, right, out=result))
            found.append(MeasuredProduct(name, m, n, k, timing.seconds, timing.spread))
    return found


def measure_copy(hardware: Hardware, watch: Stopwatch, nbytes: int) -> Timing:
    """Time a copy of ``nbytes`` in the device's memory, which reads and writes them."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=hardware.torch_device())
    target = torch.empty_like(source)
    return watch.time(lambda: target.copy_(source))


def measure_host_copy(hardware: Hardware, watch: Stopwatch, nbytes: int) -> Timing | None:
    """Time a copy to pinned host memory; None if the device is the host."""
    if hardware.on_host:
        return None
    source = torch.ones(nbytes, dtype=torch.uint8, device=hardware.torch_device())
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return watch.time(lambda: target.copy_(source, non_blocking=True))


def measure_launch(hardware: Hardware, watch: Stopwatch) -> Timing:
    """Time of the host for an operator on a few elements, which a device ends sooner."""
    x = torch.ones(8, device=hardware.torch_device())

    def run() -> None:
        for _ in range(TINY_CALLS):
            x.add_(1)

    many = watch.time(run)
    return Timing(many.seconds / TINY_CALLS, many.spread)


def measure_attention(
    hardware: Hardware, watch: Stopwatch, dtype: str, length: int
) -> tuple[Timing, float]:
    """Time causal attention of one sample of ``length`` tokens, forward and backward.

    Returns:
        The time, and the FLOPs.
    """
    where = hardware.torch_device()
    q, k, v = (
        torch.ones(1, HEADS, length, HEAD_SIZE, dtype=NAMES[dtype], device=where).requires_grad_()
        for _ in range(3)
    )
    gradient = torch.ones_like(q)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    pairs = HEADS * length * (length + 1) / 2
    return watch.time(run), (4 + 10) * pairs * HEAD_SIZE  # two products forward, five backward


def measured_device(
    base: Device,
    hardware: Hardware,
    watch: Stopwatch,
    dtypes: Sequence[str],
    largest: int,
    *,
    keep_peak: bool,
) -> Device:
    """Measure the figures of a device.

    Args:
        base: source of figures that cannot be measured: reserved memory, tiles.
        dtypes: dtypes of products.
        largest: rows and columns of the largest product.
        keep_peak: measure efficiencies relative to the peaks of ``base``; otherwise the fastest
            product of a dtype is its peak.
    """
    properties = hardware.properties()
    products = measure_products(hardware, watch, dtypes, largest)
    best: dict[str, float] = {}
    for one in products:
        rate = 2 * one.m * one.n * one.k / one.seconds / 1e12
        best[one.dtype] = max(rate, best.get(one.dtype, 0.0))
    main = dtypes[0]
    peaks = dict(base.peak_tflops) if keep_peak else {"fp32": best[main], **best}
    peak = peaks.get(main, peaks["fp32"])
    nbytes = 4 * largest * largest * 4
    copy = measure_copy(hardware, watch, nbytes)
    host = measure_host_copy(hardware, watch, nbytes)
    launch = measure_launch(hardware, watch)
    attention, flops = measure_attention(hardware, watch, main, largest)
    copied = 2 * nbytes / copy.seconds / 1e9
    memory_gbs = base.memory_gbs if keep_peak else copied
    spread = max(one.spread for one in products)
    # No product takes less than its launch; a tenth of it at least is computation (`DeviceRates`).
    fastest = 0.9 * min(one.seconds for one in products)
    source = dict(base.source)
    source.update(
        products=f"measured: {len(products)} products, spread at most {spread:.0%}",
        gemm_efficiency=f"measured: {best[main]:.4g} TFLOP/s of {main}",
        memory_efficiency=f"measured: a copy of {nbytes:,} bytes, spread {copy.spread:.0%}",
        host_us=f"measured: {TINY_CALLS} small operators, spread {launch.spread:.0%}",
        attention_efficiency=f"measured: {largest} tokens, spread {attention.spread:.0%}",
        memory_gib="of the device",
        cores="of the device",
    )
    if host is not None:
        source["host_gbs"] = f"measured: a copy of {nbytes:,} bytes, spread {host.spread:.0%}"
    if not keep_peak:
        source.update(peak_tflops="the fastest measured product", memory_gbs="the measured copy")
    return dataclasses.replace(
        base,
        name=properties.name,
        peak_tflops=peaks,
        memory_gib=properties.total_memory / GIB,
        memory_gbs=memory_gbs,
        reserved_gib=min(base.reserved_gib, properties.total_memory / GIB / 2),
        launch_us=min(base.launch_us, launch.seconds * 1e6, fastest * 1e6),
        host_us=launch.seconds * 1e6,
        cores=max(1, properties.cores),
        gemm_efficiency=_part(best[main] / peak),
        gemm_efficiencies=(dict(base.gemm_efficiencies) if keep_peak else {})
        | {
            dtype: _part(rate / peaks[dtype])
            for dtype, rate in best.items()
            if dtype != main and dtype in peaks
        },
        attention_efficiency=_part(flops / attention.seconds / (peak * 1e12)),
        memory_efficiency=_part(copied / memory_gbs),
        host_gbs=base.host_gbs if host is None else nbytes / host.seconds / 1e9,
        products=tuple(products),
        source=source,
    )


def _part(value: float) -> float:
    return min(1.0, max(0.001, value))
