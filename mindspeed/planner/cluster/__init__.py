"""The machine that a job is planned for: devices, links between them, sources of the figures.

    cluster = load_cluster("h100")                   # a preset: presets/*.json
    name, devices = machine_of("16xh100")            # as in --on
    cluster = load_cluster("run/measured.json")      # written by ``mindspeed calibrate``
    cluster = load_cluster("8xh100+8xa100")          # two kinds of nodes (mixed.py)
    cluster.memory_limit                             # bytes for tensors on a device
    cluster.collective_seconds("all_reduce", nbytes, ranks)

Files are read strictly: an unknown field is an error that names the nearest one, and so is a
missing field. Other modules of this package turn figures into seconds (rates, collectives) and
measure them (calibrate).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Annotated, Any

from mindspeed.errors import ConfigError
from mindspeed.instruments.ledger import Communication
from mindspeed.json_fields import (
    ANYTHING,
    TEXT,
    Kind,
    ListOf,
    MapOf,
    Real,
    Whole,
    check,
    check_declared,
    read_object,
)
from mindspeed.parsing import decode_json
from mindspeed.planner.cluster import collectives
from mindspeed.planner.cluster.collectives import Level
from mindspeed.ranges import MAX_RANKS

GIB = 1 << 30
_PRESETS = Path(__file__).parent / "presets"
_POSITIVE, _LIST = Real(1e-12), ListOf(ANYTHING)
Positive = Annotated[float, _POSITIVE]
NotNegative = Annotated[float, Real(0)]
Part = Annotated[float, Real(0.001, 1)]
Slowdown = Annotated[float, Real(1, 10)]
Count = Annotated[int, Whole(1)]
Text = Annotated[str, TEXT]
Sources = Annotated[Mapping[str, str], MapOf(TEXT)]

__all__ = [
    "Cluster",
    "Device",
    "Level",
    "MeasuredProduct",
    "load_cluster",
    "machine_of",
    "one_kind",
    "presets",
]


@dataclass(frozen=True)
class MeasuredProduct:
    """A matrix product ``[m, k] @ [k, n]`` that was timed on the device.

    Attributes:
        spread: interquartile range of its times, relative to their median.
    """

    dtype: Text
    m: Count
    n: Count
    k: Count
    seconds: Positive
    spread: NotNegative = 0.0


@dataclass(frozen=True)
class Device:
    """One device, which is one rank.

    Attributes:
        peak_tflops: TFLOP/s of dense matrix products, by dtype (bf16, fp16, ...).
        memory_gib: memory of the device in GiB.
        memory_gbs: bandwidth of its memory in GB/s, reads and writes together.
        reserved_gib: memory for the context, collectives, workspaces and fragmentation.
        launch_us: microseconds from the end of an operator to the start of the next one.
        cores: units that compute one tile of a matrix product each.
        tile: rows and columns of a tile.
        gemm_efficiency: fraction of the peak that large matrix products attain.
        gemm_efficiencies: the same by dtype, where it differs.
        sustained: fraction of its peak that a device holds in training, for power and heat.
        attention_efficiency: fraction of the peak that fused attention attains with heads of 128
            entries, forward, over many keys.
        attention_backward: the same of its backward, relative to forward.
        attention_keys: factors of it by the keys that a query sees: ``[[keys, factor], ...]``.
        attention_heads: the same by the entries of a head.
        memory_efficiency: fraction of ``memory_gbs`` that large copies attain.
        misaligned: slowdown of products whose rows are no multiples of 128 bytes.
        host_us: microseconds in which the host starts a kernel.
        exchange_us: microseconds that the host needs where it waits for the sizes of an exchange.
        host_gbs: bandwidth of a copy to or from host memory in GB/s.
        products: measured products, which correct the formula for products of similar size.
        source: sources of the figures, by field.
    """

    name: Text
    peak_tflops: Annotated[Mapping[str, float], MapOf(_POSITIVE)]
    memory_gib: Positive
    memory_gbs: Positive
    reserved_gib: NotNegative = 3.0
    launch_us: NotNegative = 4.0
    cores: Count = 128
    tile: Annotated[tuple[int, int], ListOf(Whole(1))] = (128, 256)
    gemm_efficiency: Part = 0.8
    sustained: Part = 1.0
    attention_efficiency: Part = 0.5
    attention_backward: Positive = 1.0
    attention_keys: Annotated[tuple[tuple[float, float], ...], _LIST] = ()
    attention_heads: Annotated[tuple[tuple[float, float], ...], _LIST] = ()
    misaligned: Slowdown = 1.0
    host_us: NotNegative = 0.0
    exchange_us: NotNegative = 0.0
    memory_efficiency: Part = 0.9
    host_gbs: Positive = 25.0
    gemm_efficiencies: Annotated[Mapping[str, float], MapOf(Real(0.001, 1))] = field(
        default_factory=dict
    )
    products: Annotated[tuple[MeasuredProduct, ...], _LIST] = ()
    source: Sources = field(default_factory=dict)

    def efficiency(self, dtype: str) -> float:
        """Fraction of the peak that large products attain."""
        return self.gemm_efficiencies.get(dtype, self.gemm_efficiency)

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense products of a dtype; an unknown dtype has the rate of fp32."""
        return 1e12 * self.peak_tflops.get(dtype, self.peak_tflops["fp32"])

    def attention(self, keys: float, head: float, backward: bool) -> float:
        """Fraction of the peak that fused attention attains.

        Args:
            keys: that a query sees on average.
            head: entries of a head.
            backward: whether it computes gradients.
        """
        part = self.attention_backward if backward else 1.0
        part *= between(self.attention_keys, keys) * between(self.attention_heads, head)
        return self.attention_efficiency * part


@dataclass(frozen=True)
class Cluster:
    """Equal devices and the links between them.

    Attributes:
        levels: links from inside out; consecutive ranks share a domain.
        overlap_slowdown: slowdown of computation while communication runs.
        collective_us: fixed microseconds of each communication.
        library: of collectives, such as NCCL; empty: not known.
        source: sources of the figures, by field.
    """

    name: Text
    device: Annotated[Device, Kind(dict, "an object")]
    levels: Annotated[tuple[Level, ...], _LIST]
    overlap_slowdown: Slowdown = 1.0
    collective_us: NotNegative = 0.0
    library: Text = ""
    source: Sources = field(default_factory=dict)
    note: Text = ""

    def __hash__(self) -> int:
        return hash((self.name, self.device.name, self.levels))

    @property
    def node_size(self) -> int | None:
        """Devices of a node; None: all are in one, or nodes have different numbers."""
        return self.levels[0].size

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """The kinds of nodes."""
        return (self,)

    def at(self, rank: int) -> Cluster:
        """The kind of a rank."""
        return self

    def check_stages(self, args: argparse.Namespace) -> None:
        """Refuse a job that several kinds of devices cannot have.

        Raises:
            ConfigError: it has another number of ranks, or a pipeline stage is on two kinds.
        """

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense products of the mean device."""
        return self.device.peak(dtype)

    @property
    def memory_limit(self) -> int:
        """Bytes that the tensors of one rank may take."""
        return int((self.device.memory_gib - self.device.reserved_gib) * GIB)

    def collective_seconds(self, op: str, payload: float, ranks: Sequence[int]) -> float:
        """Time of one communication: :func:`mindspeed.planner.cluster.collectives.seconds`.

        Args:
            op: such as ``all_gather``, see :mod:`mindspeed.instruments.ledger`.
            payload: bytes of one shard for all_gather, else of the tensor of one rank.
            ranks: global ranks of the group.
        """
        if len(ranks) < 2:
            return 0.0
        return self.collective_us * 1e-6 + collectives.seconds(op, payload, ranks, self.levels)

    def communication_seconds(self, communication: Communication) -> float:
        """Time of a recorded communication; of an all-to-all, by the bytes that the rank sends."""
        size, payload = len(communication.ranks), float(communication.payload)
        if communication.op == "all_to_all" and size > 1:
            payload = communication.wire * size / (size - 1)
        return self.collective_seconds(communication.op, payload, communication.ranks)

    def to_json(self) -> dict[str, Any]:
        """The fields as :func:`load_cluster` reads them."""
        return decode_json(json.dumps(dataclasses.asdict(self)))


def between(curve: Sequence[tuple[float, float]], at: float) -> float:
    """The value of a curve, interpolated over the logarithm of its places; 1 without any."""
    if not curve:
        return 1.0
    if at <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if at <= right:
            return low + (high - low) * log(at / left) / log(right / left)
    return curve[-1][1]


def presets() -> list[str]:
    """Names of the presets."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Load a preset by its name, a file that ends in ``.json``, or several: ``8xh100+8xa100``.

    Raises:
        ConfigError: there is no such preset or file, or a field is wrong.
    """
    text = str(name_or_path)
    where = f"--cluster {text}"
    if "+" in text:
        from mindspeed.planner.cluster.mixed import mixed_cluster

        return mixed_cluster(_parts(text, where))
    return _load(text, where)


def one_kind(name_or_path: str | Path, what: str) -> Cluster:
    """:func:`load_cluster` for what knows one kind of devices only.

    Raises:
        ConfigError: there are several.
    """
    found = load_cluster(name_or_path)
    if found.kinds != (found,):
        raise ConfigError(f"{what} knows one kind of devices, not {found.name}: name one of them")
    return found


def _load(text: str, where: str) -> Cluster:
    """A preset or a file; ``where`` begins the message about a name that is not known."""
    if text.endswith(".json"):
        values = read_object(Path(text), ConfigError)
        return _of_kinds(values, text) if "kinds" in values else parse_cluster(values, text)
    name = _preset(text)
    if name is None:
        near = ", ".join(difflib.get_close_matches(text, presets(), n=2, cutoff=0.4))
        hint, known = f"; closest: {near}" if near else "", ", ".join(presets())
        message = f"{where}: no preset of that name{hint} (there are {known})"
        raise ConfigError(f"{message}; a cluster file ends in .json")
    return parse_cluster(read_object(_PRESETS / f"{name}.json", ConfigError), name)


def _parts(text: str, where: str) -> list[tuple[int, Cluster]]:
    """Number of devices and kind of each part of ``8xh100+8xa100``."""
    parts = []
    for part in text.split("+"):
        count, times, name = part.partition("x")
        if not times or not count.isdigit() or not 0 < int(count) <= MAX_RANKS:
            raise ConfigError(f"{where}: give devices and their kind, as 16xh100 or 8xh100+8xa100")
        parts.append((int(count), _load(name, where)))
    return parts


def _of_kinds(values: Mapping[str, Any], where: str) -> Cluster:
    """A file that lists kinds of nodes."""
    from mindspeed.planner.cluster.mixed import mixed_cluster

    check(values, {"name": TEXT, "kinds": _LIST}, where, ConfigError)
    if unknown := sorted(set(values) - {"name", "kinds"}):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r} (known: name, kinds)")
    parts = []
    for index, one in enumerate(values["kinds"]):
        here = f"{where}: kinds[{index}]"
        if not isinstance(one, Mapping) or set(one) != {"devices", "cluster"}:
            raise ConfigError(f"{here} is no object with devices and cluster")
        check(one, {"devices": Whole(1, MAX_RANKS), "cluster": TEXT}, here, ConfigError)
        parts.append((one["devices"], _load(one["cluster"], here)))
    if not parts:
        raise ConfigError(f"{where}: kinds is empty; list devices and cluster of each kind")
    return mixed_cluster(parts, values.get("name", ""))


def _preset(text: str) -> str | None:
    """The preset of a name, which may lack its maker and be spelt otherwise: ``910B``."""
    wanted = text.lower().replace("_", "-")
    return next((one for one in presets() if wanted in (one, one.removeprefix("ascend-"))), None)


def machine_of(text: str) -> tuple[str, int]:
    """Cluster and number of devices of ``16xh100``, ``8xmeasured.json`` or ``8xh100+8xa100``.

    A file that lists several kinds of nodes says their numbers: ``nodes.json``.

    Raises:
        ConfigError: it is not written so, or there is no such cluster.
    """
    from mindspeed.planner.cluster.mixed import MixedCluster, mixed_cluster

    where = f"--on {text}"
    if text.endswith(".json") and not text.partition("x")[0].isdigit():
        found = _load(text, where)
        if not isinstance(found, MixedCluster):
            raise ConfigError(f"{where}: say how many devices, as 16x{text}")
        return text, found.devices
    parts = _parts(text, where)
    if len(parts) > 1:
        return text, mixed_cluster(parts).devices
    ((count, kind),) = parts
    if isinstance(kind, MixedCluster) and kind.devices != count:
        raise ConfigError(f"{where}: the file lists {kind.devices} devices")
    return text.partition("x")[2], count


def parse_cluster(values: Mapping[str, Any], where: str) -> Cluster:
    """Build a cluster from a JSON object; ``where`` is the name of its file, for messages.

    Raises:
        ConfigError: a field is unknown, missing or wrong.
    """
    check_declared(values, Cluster, where, ConfigError, _REMOVED)
    levels = _objects(values["levels"], Level, f"{where}: levels")
    _check_levels(levels, where)
    device = _device(values["device"], f"{where}: device")
    return Cluster(**{**values, "device": device, "levels": levels})


def _objects(values: Sequence[Any], kind: type, where: str) -> tuple[Any, ...]:
    for index, one in enumerate(values):
        check_declared(one, kind, f"{where}[{index}]", ConfigError)
    return tuple(kind(**one) for one in values)


def _device(values: Mapping[str, Any], where: str) -> Device:
    check_declared(values, Device, where, ConfigError, _REMOVED)
    products = _objects(values.get("products", ()), MeasuredProduct, f"{where}.products")
    tile = tuple(values.get("tile", Device.tile))
    if len(tile) != 2:
        raise ConfigError(f"{where}.tile is {list(tile)}; allowed are two: rows and columns")
    curves = {name: _curve(values.get(name, ()), f"{where}.{name}") for name in _CURVES}
    device = Device(**{**values, **curves, "products": products, "tile": tile})
    if "fp32" not in device.peak_tflops:
        raise ConfigError(f"{where}.peak_tflops: fp32 is missing, the rate of other dtypes")
    reserved, whole = device.reserved_gib, device.memory_gib
    if reserved >= whole:
        raise ConfigError(
            f"{where}: reserved_gib {reserved:g} leaves nothing of memory_gib {whole:g}"
        )
    return device


_CURVES = ("attention_keys", "attention_heads")


def _curve(values: Sequence[Any], where: str) -> tuple[tuple[float, float], ...]:
    for one in values:
        check({"pair": one}, {"pair": ListOf(_POSITIVE)}, where, ConfigError)
        if len(one) != 2:
            raise ConfigError(f"{where} has {one}; allowed are pairs of a place and a factor")
    curve = tuple((float(place), float(factor)) for place, factor in values)
    if any(left >= right for (left, _), (right, _) in pairwise(curve)):
        raise ConfigError(f"{where}: its places must grow")
    return curve


def _check_levels(levels: Sequence[Level], where: str) -> None:
    if not levels:
        raise ConfigError(f"{where}: levels is empty; describe at least one link")
    for inner, outer in pairwise(levels):
        nested = inner.size and (
            outer.size is None or (outer.size > inner.size and outer.size % inner.size == 0)
        )
        if not nested:
            raise ConfigError(
                f"{where}: level {outer.name} of {outer.size} devices cannot be outside of level "
                f"{inner.name} of {inner.size}: levels are ordered from inside out, each size is a "
                "multiple of the one before, only the last one is null"
            )


_REMOVED = {"fused_chains": ", of an earlier release: a plan knows what is fused, delete it"}
"""What to do about fields that files had."""
