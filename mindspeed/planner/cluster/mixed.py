"""Several kinds of nodes in one job: each pipeline stage is on devices of one kind.

    cluster = mixed_cluster([(8, load_cluster("h100")), (8, load_cluster("a100"))])
    cluster.at(rank)                                 # the kind of a rank
    cluster.collective_seconds("send", nbytes, (4, 8))

Ranks are numbered kind by kind in the order that is given, as nodes that are started in this order.
A group of ranks of one kind has the links of that kind. Between kinds the slower one decides:
messages go over the outermost links of both, and a collective takes as long as the slowest kind
would need for it.

Where one figure stands for the whole cluster it is that of the kind with most memory; the memory
limit and the seconds of a stage are those of its kind. Kinds need one library of collectives: NCCL
of NVIDIA's devices does not talk to HCCL of Ascend or RCCL of AMD.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.job import Parallel
from mindspeed.planner.cluster import GIB, Cluster, Level


@dataclass(frozen=True)
class MixedCluster(Cluster):
    """A cluster of several kinds.

    Attributes:
        parts: number of devices of each kind, and the kind, in the order of ranks.
    """

    parts: tuple[tuple[int, Cluster], ...] = ()

    __hash__ = Cluster.__hash__

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """The kinds, each once."""
        return tuple(dict.fromkeys(kind for _, kind in self.parts))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(count for count, _ in self.parts)

    @property
    def node_size(self) -> int | None:
        """See :attr:`Cluster.node_size`; a kind with fewer devices than a node is one."""
        sizes = {min(count, kind.node_size or count) for count, kind in self.parts}
        return sizes.pop() if len(sizes) == 1 else None

    def at(self, rank: int) -> Cluster:
        """The kind of a rank; ranks beyond the last are of the last kind."""
        ends = accumulate(count for count, _ in self.parts)
        found = (kind for end, (_, kind) in zip(ends, self.parts, strict=True) if rank < end)
        return next(found, self.parts[-1][1])

    def peak(self, dtype: str) -> float:
        """FLOP/s of the mean device."""
        return sum(count * kind.peak(dtype) for count, kind in self.parts) / self.devices

    def collective_seconds(self, op: str, payload: float, ranks: Sequence[int]) -> float:
        """Time of one communication: that of the slowest kind in the group."""
        kinds = {self.at(rank) for rank in ranks}
        if len(kinds) > 1 and op in ("send", "recv"):
            kinds = {replace(kind, levels=kind.levels[-1:]) for kind in kinds}
        return max(kind.collective_seconds(op, payload, ranks) for kind in kinds)

    def stage_kinds(self, stages: int) -> tuple[Cluster, ...] | None:
        """The kind of each pipeline rank; None: one would be on two kinds."""
        size, ends = self.devices // stages, accumulate(count for count, _ in self.parts)
        if any(end % size for end in ends):
            return None
        return tuple(self.at(stage * size) for stage in range(stages))

    def check_stages(self, args: argparse.Namespace) -> None:
        """See :meth:`Cluster.check_stages`."""
        parallel = Parallel.of(args)
        if parallel.world != self.devices:
            raise ConfigError(
                f"{self.name} has {self.devices} devices, the job {parallel.world} ranks"
            )
        stages = parallel.pipeline
        if self.stage_kinds(stages) is None:
            counts = " and ".join(f"{count} {kind.name}" for count, kind in self.parts)
            raise ConfigError(
                f"--pipeline-model-parallel-size {stages}: a stage of {self.devices // stages} "
                f"ranks would be on two kinds of devices ({counts}): each kind needs whole stages"
            )

    def limited(self, nbytes: float) -> MixedCluster:
        """The cluster with as many bytes for tensors on every device."""
        parts = []
        for count, kind in self.parts:
            device = replace(kind.device, memory_gib=nbytes / GIB, reserved_gib=0.0)
            parts.append((count, replace(kind, device=device)))
        return mixed_cluster(parts, self.name)

    def to_json(self) -> dict[str, Any]:
        """The kinds."""
        kinds = [{"devices": count, "cluster": kind.to_json()} for count, kind in self.parts]
        return {"name": self.name, "kinds": kinds}


def mixed_cluster(parts: Sequence[tuple[int, Cluster]], name: str = "") -> MixedCluster:
    """A cluster of several kinds.

    Args:
        parts: number of devices of each kind, and the kind, in the order of ranks.
        name: its name; default: ``8xh100+8xa100``.

    Raises:
        ConfigError: kinds cannot communicate.
    """
    name = name or "+".join(f"{count}x{kind.name}" for count, kind in parts)
    by_library: dict[str, str] = {kind.library: kind.name for _, kind in parts if kind.library}
    if len(by_library) > 1:
        known = " and ".join(f"{kind} has {library}" for library, kind in by_library.items())
        raise ConfigError(f"{name}: these devices have no collectives in common: {known}")
    for _, kind in parts:
        if kind.levels[-1].size is not None:
            raise ConfigError(
                f"{name}: {kind.name} has no links between nodes: its outermost level has "
                f"{kind.levels[-1].size} devices"
            )
    most = max((kind for _, kind in parts), key=lambda kind: kind.memory_limit)
    values: Mapping[str, Any] = {
        "name": name,
        "levels": _levels([kind for _, kind in parts]),
        "library": next(iter(by_library), ""),
    }
    fields = {item: getattr(most, item) for item in ("device", "overlap_slowdown", "collective_us")}
    return MixedCluster(**{**fields, **values, "parts": tuple(parts)})


def _levels(kinds: Sequence[Cluster]) -> tuple[Level, ...]:
    """The smallest node, and the slowest links between nodes."""
    inner = min((kind.levels[0] for kind in kinds), key=lambda level: level.size or 1 << 30)
    outer = min((kind.levels[-1] for kind in kinds), key=lambda level: level.bytes_per_second)
    return (inner, outer) if inner.size is not None else (outer,)
