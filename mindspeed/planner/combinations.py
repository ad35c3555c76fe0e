"""Which values of the dimensions of a search go together: what divides the sizes of a job.

The dimensions are those of :class:`~mindspeed.planner.space.Space`, in its order: a combination is
refused at the first value that cannot be, with the reason that a search counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.planner.layout import V_SHAPES

Split = str | tuple[int, ...]
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a job that its layout must divide.

    Attributes:
        devices: ranks.
        global_batch_size: samples of a step.
        num_layers: transformer layers.
        heads: attention heads.
        query_groups: of grouped-query attention; else as many as heads.
        seq_length: tokens of a sample.
        experts: of a layer; 0 without.
        aligned: sizes must be divisible by ``tp``.
    """

    devices: int
    global_batch_size: int
    num_layers: int
    heads: int
    query_groups: int
    seq_length: int
    experts: int = 0
    aligned: bool = True

    @classmethod
    def of(cls, args: argparse.Namespace, devices: int) -> Sizes:
        """That of a job on some devices.

        Args:
            args: final values of the job in any layout.
            devices: ranks.
        """
        heads = args.num_attention_heads
        return cls(
            devices,
            args.global_batch_size,
            args.num_layers,
            heads,
            args.num_query_groups if args.group_query_attention else heads,
            args.seq_length,
            args.num_experts or 0,
            not args.unaligned_linear,
        )


def stage_layers(num_layers: int, stages: int, split: Split) -> tuple[int, ...] | None:
    """Layers of each stage; None if the model cannot be divided so.

    Args:
        num_layers: of the model.
        stages: of the pipeline, chunks counted.
        split: ``even``, ``ends`` or the layers themselves. With ``ends`` the stages that have one
            layer less than the others are the last one, with the output layer, then the first ones,
            which hold most micro-batches.
    """
    if isinstance(split, tuple):
        return split if len(split) == stages and sum(split) == num_layers else None
    if split == "even":
        return None if num_layers % stages else (num_layers // stages,) * stages
    if stages < 2:
        return None
    longest = -(-num_layers // stages)
    fewer = stages * longest - num_layers
    lighter = [stages - 1, *range(stages - 1)][:fewer]
    return tuple(longest - (stage in lighter) for stage in range(stages)) if fewer else None


def reason_against(name: str, sizes: Sizes, point: Point) -> str | None:
    """Why no layout with these values exists; None: one may.

    Args:
        name: of the dimension whose value was chosen last.
        sizes: of the job.
        point: values of this dimension and of those before it, by their names.
    """
    check = _CHECKS.get(name)
    return check(sizes, point) if check is not None else None


def _tensor(sizes: Sizes, point: Point) -> str | None:
    tp, groups = point["tp"], sizes.query_groups
    if sizes.devices % tp:
        return "devices are not divisible by tp"
    if sizes.aligned and sizes.heads % tp:
        return "attention heads are not divisible by tp"
    if sizes.aligned and groups % tp and tp % groups:
        return "neither query groups nor tp divide the other"
    if sizes.aligned and tp > 1 and sizes.seq_length % tp:
        return "the sequence is not divisible by tp"
    return None


def _context(sizes: Sizes, point: Point) -> str | None:
    if sizes.devices % (point["tp"] * point["cp"]):
        return "devices are not divisible by tp x cp"
    if point["cp"] > 1 and sizes.seq_length % (2 * point["cp"]):
        return "the sequence is not divisible by 2 cp"
    return None


def _experts(sizes: Sizes, point: Point) -> str | None:
    if point["ep"] > 1 and (not sizes.experts or sizes.experts % point["ep"]):
        return "experts are not divisible by ep"
    return None


def _pipeline(sizes: Sizes, point: Point) -> str | None:
    pp = point["pp"]
    if sizes.devices % (point["tp"] * point["cp"] * pp):
        return "devices are not divisible by tp x cp x pp"
    etp = point["tp"] if point["etp"] is None else point["etp"]
    if sizes.experts and sizes.devices % (etp * point["ep"] * pp):
        return "devices are not divisible by etp x ep x pp"
    return None


def _micro_batch(sizes: Sizes, point: Point) -> str | None:
    dp = sizes.devices // (point["tp"] * point["cp"] * point["pp"])
    if sizes.global_batch_size % (point["mbs"] * dp):
        return "the global batch is not divisible by mbs x dp"
    return None


def _chunks(sizes: Sizes, point: Point) -> str | None:
    if point["vpp"] > 1 and point["pp"] == 1:
        return "vpp needs pp of at least 2"
    if point["vpp"] * point["pp"] > sizes.num_layers:
        return "more stages than layers"
    return None


def _schedule(sizes: Sizes, point: Point) -> str | None:
    schedule = point["schedule"]
    if schedule is None:
        return None
    if point["pp"] == 1:
        return "schedules need pp of at least 2"
    if schedule in V_SHAPES and point["vpp"] != 2:
        return "schedules in a V-shape have vpp 2"
    dp = sizes.devices // (point["tp"] * point["cp"] * point["pp"])
    micro_batches = sizes.global_batch_size // (point["mbs"] * dp)
    if schedule == "dualpipev" and micro_batches < 2 * point["pp"]:
        return "dualpipev needs 2 pp micro-batches"
    return None


def _split(sizes: Sizes, point: Point) -> str | None:
    stages, split = point["pp"] * point["vpp"], point["split"]
    if split != "even" and point["schedule"] in V_SHAPES:
        return "schedules in a V-shape divide layers evenly"
    if stage_layers(sizes.num_layers, stages, split) is not None:
        return None
    if isinstance(split, tuple):
        return "the layers of stages are those of another pp x vpp"
    return "layers are not divisible by pp x vpp" if split == "even" else _UNEVEN


def _sharding(sizes: Sizes, point: Point) -> str | None:
    if point["optimizer"] in ("zero2", "zero3") and point["pp"] > 1:
        return "ZeRO 2 and 3 have no pipeline"
    return None


_UNEVEN = "layers are divisible by pp x vpp, so no stage has fewer"
_CHECKS: Mapping[str, Callable[[Sizes, Point], str | None]] = {
    "tp": _tensor,
    "cp": _context,
    "ep": _experts,
    "pp": _pipeline,
    "mbs": _micro_batch,
    "vpp": _chunks,
    "schedule": _schedule,
    "split": _split,
    "optimizer": _sharding,
}
