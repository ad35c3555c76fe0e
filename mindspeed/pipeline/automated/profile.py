"""What was measured of a job: time and memory of every layer and of both ends of the model.

Times are seconds and activations bytes of ONE micro-batch on one rank. The file:

    {"version": 1, "job": {"num_layers": 8, ...},
     "ranks": 4, "chunks": 1, "micro_batch_size": 2, "num_microbatches": 16, "latency": 1e-5,
     "layers": [{"forward": 0.1, "backward": 0.2, "activations": 1000, "static": 5000,
                 "recompute": {"mlp": {"seconds": 0.05, "bytes": 400}, ...}}, ...],
     "first": {"forward": ..., "backward": ..., "activations": ..., "static": ...},
     "last": {...}}

``static`` are weights, gradients and optimizer states. ``job`` says of which model and layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.json_fields import (
    Allowed,
    Anything,
    ListOf,
    MapOf,
    Object,
    Real,
    Whole,
    check,
    read_object,
)

VERSION = 1
MODULES = ("mlp", "attention", "layer")
"""What may be recomputed of a layer, by the number of ``--recompute-type``."""
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class RecomputedModule:
    """A module that is computed again in backward.

    Attributes:
        seconds: of its second run.
        bytes: of activations that it does not keep.
    """

    seconds: float
    bytes: float


@dataclass(frozen=True)
class EndLayers:
    """The embedding (``first``), or output layer and loss (``last``).

    Attributes:
        forward: seconds.
        backward: seconds.
        activations: bytes kept from forward to backward.
        static: bytes of weights, gradients and optimizer states.
    """

    forward: float = 0.0
    backward: float = 0.0
    activations: float = 0.0
    static: float = 0.0


@dataclass(frozen=True)
class ProfiledLayer(EndLayers):
    """A transformer layer.

    Attributes:
        recompute: what each module saves, by its name in :data:`MODULES`.
    """

    recompute: Mapping[str, RecomputedModule] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """Measurements of a job.

    Attributes:
        layers: in the order of the model; those of multi-token prediction belong to ``last``.
        first: the embedding.
        last: output layer and loss.
        ranks: of the pipeline.
        chunks: of each rank.
        micro_batch_size: samples of a micro-batch.
        num_microbatches: of a step on one rank.
        latency: seconds from the end of a stage to the start of the next one.
        job: values of the arguments on which the costs depend.
    """

    layers: tuple[ProfiledLayer, ...]
    first: EndLayers
    last: EndLayers
    ranks: int
    num_microbatches: int
    chunks: int = 1
    micro_batch_size: int = 1
    latency: float = 0.0
    job: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path | str) -> None:
        """Write the file, atomically."""
        value = {"version": VERSION, **asdict(self)}
        atomic_write_text(path, json.dumps(value, indent=1) + "\n")


_SECONDS = _BYTES = Real(0.0)
_PART: dict[str, Allowed] = {
    "forward": _SECONDS,
    "backward": _SECONDS,
    "activations": _BYTES,
    "static": _BYTES,
}
_SAVING = Object({"seconds": _SECONDS, "bytes": _BYTES})
_LAYER = {**_PART, "recompute": Object(dict.fromkeys(MODULES, _SAVING))}
_FIELDS: dict[str, Allowed] = {
    "version": Whole(VERSION, VERSION),
    "layers": ListOf(Object(_LAYER)),
    "first": Object(_PART),
    "last": Object(_PART),
    "ranks": Whole(2, 100_000),
    "chunks": Whole(1, 1000),
    "micro_batch_size": Whole(1),
    "num_microbatches": Whole(1),
    "latency": _SECONDS,
    "job": MapOf(Anything()),
}
_NEEDED = ("version", "layers", "ranks", "num_microbatches")


def read_profile(path: Path | str) -> Profile:
    """Read a file that :meth:`Profile.write` wrote, or that was written by hand.

    Raises:
        ConfigError: it is none; names the file, the field, and what is expected.
    """
    where = f"profile {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: there is no such file; --automated-pipeline writes one")
    value = read_object(Path(path), ConfigError)
    if missing := [name for name in _NEEDED if name not in value]:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    check(value, _FIELDS, where, ConfigError)
    profile = Profile(
        layers=tuple(_layer(one, f"{where}: layers[{i}]") for i, one in enumerate(value["layers"])),
        first=EndLayers(**_part(value.get("first", {}))),
        last=EndLayers(**_part(value.get("last", {}))),
        ranks=value["ranks"],
        num_microbatches=value["num_microbatches"],
        **{
            name: value[name]
            for name in ("chunks", "micro_batch_size", "latency", "job")
            if name in value
        },
    )
    if not any(layer.forward for layer in profile.layers):
        raise ConfigError(f"{where}: layers: none takes any time in its forward")
    if len(profile.layers) > MOST_LAYERS:
        raise ConfigError(f"{where}: layers: more than {MOST_LAYERS}")
    return profile


def _part(value: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value[name]) for name in _PART if name in value}


def _layer(value: Mapping[str, Any], where: str) -> ProfiledLayer:
    savings = value.get("recompute", {})
    if unknown := set(savings) - set(MODULES):
        known = ", ".join(MODULES)
        raise ConfigError(f"{where}.recompute: {min(unknown)!r} is none of {known}")
    found = {
        name: RecomputedModule(float(one.get("seconds", 0)), float(one.get("bytes", 0)))
        for name, one in savings.items()
    }
    layer = ProfiledLayer(**_part(value), recompute=found)
    for name, one in found.items():
        if one.bytes > layer.activations:
            raise ConfigError(
                f"{where}.recompute.{name}.bytes is {one.bytes:,.0f}, more than the layer's "
                f"activations, {layer.activations:,.0f}"
            )
    return layer
