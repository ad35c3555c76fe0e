"""Executed FLOPs per second of the whole job, measured between two lines of the log.

The FLOPs of a step depend on shapes only, so a step is counted only if its signature (batch size
and anything else that the caller adds) is new; other steps cost two clock readings. One all_reduce
of two numbers per log line gives the mean over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.instruments.flops import FlopCount, FlopCounter
from mindspeed.profiling.model_flops import ModelShape, model_flops


@dataclass(frozen=True)
class Throughput:
    """FLOPs of one device (mean over ranks) and sequences of all ranks in a period."""

    without_recompute: float
    with_recompute: float
    sequences: int
    seconds: float


class ThroughputMeter:
    """Adds up FLOPs and seconds of training steps.

    Args:
        signature: called before each step; steps with equal values execute equal FLOPs (summed
            over ranks). None: always count the step.
    """

    def __init__(self, signature: Callable[[], Hashable]) -> None:
        self._signature = signature
        self._counted: dict[Hashable, FlopCount] = {}
        self._reset()

    def _reset(self) -> None:
        self._flops = FlopCount()
        self._sequences = 0
        self._seconds = 0.0
        self._last_step_ended: float | None = None

    @contextmanager
    def step(self, sequences: int) -> Iterator[None]:
        """Context of one training step with ``sequences`` sequences on all ranks together."""
        signature = self._signature()
        known = self._counted.get(signature) if signature is not None else None
        begin = time.perf_counter()
        if known is None:
            with FlopCounter() as counter:
                yield
            known = self._counted[signature] = counter.count
        else:
            yield
        self._last_step_ended = time.perf_counter()
        self._seconds += self._last_step_ended - begin
        self._flops += known
        self._sequences += sequences

    def read(self) -> Throughput:
        """The mean since the last reading. Collective.

        Time between steps (evaluation, checkpoints) does not count. Device work that is still
        running after the last step counts if the caller has waited for it.
        """
        seconds = self._seconds
        if self._last_step_ended is not None:
            seconds += time.perf_counter() - self._last_step_ended
        without_recompute, total = _mean_over_ranks(self._flops)
        result = Throughput(without_recompute, total, self._sequences, seconds)
        self._reset()
        return result


def describe(measured: Throughput, shape: ModelShape | None) -> str:
    """The part of a log line about throughput; without ``shape`` only executed FLOPs."""
    name = device.current().name
    name = _NAMES.get(name, name.upper())
    seconds = max(measured.seconds, 1e-9)

    def entry(what: str, *flops: float) -> str:
        values = " / ".join(f"{flop / seconds / 1e12:.4g}" for flop in flops)
        return f"{what} (TFLOP/s/{name}): {values}"

    parts = [
        entry(f"actual throughput per {name}", measured.without_recompute),
        entry(f"actual throughput per {name} with recompute", measured.with_recompute),
    ]
    if shape is not None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        halved, whole = (
            model_flops(shape, measured.sequences, causal=causal) / world_size
            for causal in (True, False)
        )
        what = f"model throughput per {name}, causal attention counted half / whole"
        parts.append(entry(what, halved, whole))
    return " | ".join(parts)


_NAMES = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}


def _mean_over_ranks(count: FlopCount) -> tuple[float, float]:
    if not dist.is_initialized():
        return float(count.without_recompute), float(count.total)
    here = device.current()
    dtype = torch.float64 if here.has("fp64_collectives") else torch.float32
    values = torch.tensor(
        [count.without_recompute, count.total], dtype=dtype, device=here.torch_device()
    )
    dist.all_reduce(values)
    without_recompute, total = (values / dist.get_world_size()).tolist()
    return without_recompute, total
