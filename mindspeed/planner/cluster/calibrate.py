"""Measure a cluster: the rates that the devices and links of this job attain.

    cluster = calibrate(Settings(name="ours"), load_cluster("h100"), keep_peak=True)

All ranks measure their devices at once, as in training; figures are medians over ranks. Collectives
run over two levels: inside a node, and between equal local ranks of all nodes. Figures that this
job cannot measure (the links of a single rank) are those of the given cluster, with a note.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import ConfigError
from mindspeed.planner.cluster import Cluster, Device, Level
from mindspeed.planner.cluster.measured_device import Stopwatch, measured_device, of_samples
from mindspeed.planner.cluster.measured_links import (
    Fit,
    Sample,
    all_reduce_error,
    fit,
    groups_of,
    measure_links,
)

_MEDIANS = (
    "memory_gbs",
    "host_us",
    "gemm_efficiency",
    "attention_efficiency",
    "memory_efficiency",
    "host_gbs",
)


@dataclass(frozen=True)
class CalibrationSettings:
    """Figures to measure, and the effort.

    Attributes:
        dtypes: dtypes of matrix products; attention uses the first one.
        largest: rows and columns of the largest matrix, tokens of attention.
        largest_message: bytes of the largest collective.
        node_size: ranks of a node; None: those that the launcher started on this host.
        samples: number of samples of each figure.
        seconds: minimum duration of a sample.
    """

    name: str
    dtypes: Sequence[str] = ("bf16", "fp32")
    largest: int = 8192
    largest_message: int = 1 << 28
    node_size: int | None = None
    samples: int = 7
    seconds: float = 0.01


def calibrate(settings: CalibrationSettings, base: Cluster, *, keep_peak: bool) -> Cluster:
    """Measure the devices and links of this job. Collective: all ranks get the same result.

    Args:
        base: source of figures that are not measured.
        keep_peak: keep the peaks of ``base``, which describes this hardware, and measure
            efficiencies.

    Raises:
        ConfigError: the ranks do not fill whole nodes, or a dtype cannot be measured.
    """
    hardware = device.current()
    world = dist.get_world_size()
    node = _node_size(settings.node_size, world)
    watch = Stopwatch(hardware.synchronize, settings.samples, settings.seconds)
    own = measured_device(
        base.device, hardware, watch, settings.dtypes, settings.largest, keep_peak=keep_peak
    )
    found = _median_device(own)
    if world == 1:
        note = f"Links were not measured: one rank alone. They are those of {base.name}."
        return dataclasses.replace(base, name=settings.name, device=found, note=note)
    where = hardware.torch_device()
    shared = dataclasses.replace(watch, agree=_largest_of_ranks(where))
    samples = measure_links(groups_of(world, node), where, shared, settings.largest_message)
    samples = _median_samples(samples)
    fitted = fit(samples)
    slowdown = _slowdown(hardware, watch, settings)
    cluster = dataclasses.replace(
        base,
        name=settings.name,
        device=found,
        levels=_levels(base.levels, samples, fitted, node, world),
        collective_us=fitted.start * 1e6,
        overlap_slowdown=slowdown,
        source={
            "collective_us": f"fitted to {len(samples)} collectives, median error "
            f"{fitted.error:.0%}; all-reduces, which were not fitted: "
            f"{all_reduce_error(samples, fitted):.0%}",
            "overlap_slowdown": "measured: products during an all-reduce",
        },
        note=f"Measured on {world} ranks, {node} in a node.",
    )
    same: Cluster = _of_all_ranks(cluster)[0]  # the last bits of a fit may differ between ranks
    return same


def watch_of(settings: CalibrationSettings) -> Stopwatch:
    """Times what all ranks run together."""
    hardware = device.current()
    agree = _largest_of_ranks(hardware.torch_device())
    return Stopwatch(hardware.synchronize, settings.samples, settings.seconds, agree)


def _node_size(given: int | None, world: int) -> int:
    node = given or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % node:
        raise ConfigError(f"--node-size {node} does not divide the {world} ranks of this job")
    return node


def _levels(
    given: Sequence[Level], samples: Sequence[Sample], fitted: Fit, node: int, world: int
) -> tuple[Level, ...]:
    """Measured links inside nodes and between them; other levels are those given."""
    sizes = [node, None]
    names = [given[0].name, given[-1].name if len(given) > 1 else "network"]
    levels = []
    for index, (size, name) in enumerate(zip(sizes, names, strict=True)):
        if index in fitted.levels:
            latency, rate = fitted.levels[index]
            spreads = [sample.spread for sample in samples if sample.level == index]
            source = f"measured: {len(spreads)} collectives, median spread {median(spreads):.0%}"
            levels.append(Level(name, size, rate / 1e9, latency * 1e6, source=source))
        elif index == 1 and len(given) > 1:
            source = f"not measured: one node of {world} ranks; {given[-1].source}"
            levels.append(dataclasses.replace(given[-1], source=source))
    if len(levels) == 1:  # one rank in each node, or no link is known beyond this node
        levels = [dataclasses.replace(levels[0], size=None)]
    return tuple(levels)


def _largest_of_ranks(where: torch.device) -> Callable[[int], int]:
    def agree(count: int) -> int:
        largest = torch.tensor(count, device=where)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())

    return agree


def _of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _median_device(own: Device) -> Device:
    """Medians of the figures of all ranks."""
    ranks: list[Device] = _of_all_ranks(own)
    products = [
        dataclasses.replace(same[0], seconds=median(one.seconds for one in same))
        for same in zip(*(rank.products for rank in ranks), strict=True)
    ]
    changes = {name: median(getattr(rank, name) for rank in ranks) for name in _MEDIANS}
    peaks = {dtype: median(rank.peak_tflops[dtype] for rank in ranks) for dtype in own.peak_tflops}
    return dataclasses.replace(ranks[0], peak_tflops=peaks, products=tuple(products), **changes)


def _median_samples(own: Sequence[Sample]) -> list[Sample]:
    """Medians of the samples of all ranks, which do not end a collective at the same time."""
    return [
        dataclasses.replace(same[0], seconds=of_samples([one.seconds for one in same]).seconds)
        for same in zip(*_of_all_ranks(list(own)), strict=True)
    ]


def _slowdown(hardware: device.Device, watch: Stopwatch, settings: CalibrationSettings) -> float:
    """Slowdown of matrix products while all ranks run an all-reduce."""
    where = hardware.torch_device()
    size = max(1, settings.largest // 2)
    a = torch.ones(size, size, device=where)
    message = torch.ones(settings.largest_message // 4, device=where)
    wait = watch.synchronize if hardware.on_host else hardware.current_stream().synchronize
    ratios = []
    for _ in range(settings.samples):
        alone = _time_of(watch, wait, a)
        dist.barrier()
        work = dist.all_reduce(message, async_op=True)
        overlapped = _time_of(watch, wait, a)
        work.wait()
        hardware.synchronize()
        ratios.append(overlapped / alone)
    return min(10.0, max(1.0, median(median(each) for each in _of_all_ranks(ratios))))


def _time_of(watch: Stopwatch, wait: Callable[[], None], a: torch.Tensor) -> float:
    start = watch.now()
    torch.mm(a, a)
    wait()
    return watch.now() - start
