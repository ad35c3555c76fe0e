"""Steps of jobs counted on FakeTensors, by one mode and by nested instruments; in own processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.planner.real_and_fake import _args

JOB = (
    "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --use-distributed-optimizer "
    "--transformer-impl transformer_engine --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
)


def arguments(flags: str, world: int) -> Any:
    """Final values of a tiny job."""
    return _args(flags, world, "--dry-run")


def twice() -> dict[str, tuple[Any, Any]]:
    """Figures of one mode, and those of the instruments that it stands for."""
    from mindspeed.instruments import CommLedger
    from mindspeed.instruments.flops import FlopCounter
    from mindspeed.instruments.live_memory import LiveMemory
    from mindspeed.planner.count.counted_step import count_step

    ledger, flops = CommLedger(), FlopCounter()

    @contextmanager
    def watch(memory: LiveMemory) -> Iterator[None]:
        with ledger, flops:
            yield

    step = count_step(arguments(JOB, 4), watch=watch)
    return {
        "FLOPs": (step.flops, flops.count),
        "communications": (list(step.communications), ledger.events),
        "bytes at the peak": (step.peak, step.at_peak.total()),
    }


def kinds(flags: str, world: int) -> tuple[int, Counter[str], int]:
    """Parameters, bytes between steps by kind, bytes of the host."""
    from mindspeed.planner.count.counted_step import count_step

    step = count_step(arguments(flags, world))
    return step.parameters, step.static, step.host


def messages(flags: str, world: int, layers: tuple[int, int]) -> list[tuple[Any, ...]]:
    """Of jobs with so many layers: calls, payload and bytes sent by group and operation."""
    from mindspeed.planner.count.check import traffic
    from mindspeed.planner.count.counted_step import count_step

    found = []
    for number in layers:
        args = arguments(f"{flags} --num-layers {number}", world)
        step = count_step(args, micro_batches=1)
        rows = {
            (row.group, row.op): (row.calls, row.payload, row.wire)
            for row in traffic(step.communications)
        }
        found.append((args, step.parameters, rows))
    return found


def refusals() -> dict[str, str]:
    """What is said about code that reads values and operators without a fake kernel."""
    import torch

    from mindspeed.errors import MindSpeedError
    from mindspeed.planner.count.planned_tensors import PlannedTensors

    library = torch.library.Library("planner_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", torch.clone, "CPU")
    opaque = torch.ops.planner_test.opaque
    found = {}
    with PlannedTensors():
        x = torch.ones(3)
        for name, read in {
            "item": lambda: x.sum().item(),
            "branch": lambda: bool(x[0] > 0),
            "nonzero": lambda: x.nonzero(),
            "opaque": lambda: opaque(x),
        }.items():
            try:
                read()
            except MindSpeedError as error:
                found[name] = f"{type(error).__name__}: {error}"
        found["constant"] = str(torch.tensor([3]).item())
    return found
