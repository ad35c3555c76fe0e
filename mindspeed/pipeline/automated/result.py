"""The file of a search: the choice, its flags, and what it was predicted to bring.

The same values as flags start the same run without a profile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.json_fields import (
    Allowed,
    Anything,
    Kind,
    ListOf,
    MapOf,
    OneOf,
    Whole,
    check,
    or_null,
    read_object,
)
from mindspeed.pipeline.automated.profile import MODULES, VERSION
from mindspeed.pipeline.automated.search import Found
from mindspeed.pipeline.automated.stages import Price
from mindspeed.pipeline.layout import Layers
from mindspeed.pipeline.schedule.schedules import KINDS

_COUNT, _TEXT = Whole(0, 10_000), Kind(str, "a text")
_FIELDS: dict[str, Allowed] = {
    "version": Whole(VERSION, VERSION),
    "mode": OneOf("memory", "perf"),
    "job": MapOf(Anything()),
    "layers": ListOf(ListOf(_COUNT)),
    "recompute": ListOf(_COUNT),
    "module": OneOf(*MODULES),
    "schedule": OneOf(*KINDS),
    "sizes": or_null(ListOf(Whole(1))),
}


@dataclass(frozen=True)
class SearchOutcome:
    """Outcome of a search.

    Attributes:
        mode: ``memory`` or ``perf``.
        job: values of the arguments for which it holds.
        layers: of each chunk of each rank.
        recompute: for each rank how many of its first layers recompute the module.
        module: one of :data:`.profile.MODULES`.
        schedule: its kind.
        sizes: samples of each micro-batch; None: all equal.
    """

    mode: str
    job: Mapping[str, Any]
    layers: Layers
    recompute: tuple[int, ...]
    module: str
    schedule: str
    sizes: tuple[int, ...] | None = None

    def values(self) -> dict[str, Any]:
        """The choice as values of flags, by their names."""
        found: dict[str, Any] = {}
        if len(self.layers[0]) == 1:
            found["num_layer_list"] = ",".join(str(count) for (count,) in self.layers)
        else:
            rows = ",".join(f"[{','.join(map(str, row))}]" for row in self.layers)
            found["pipeline_num_transformer_layers"] = f"[{rows}]"
        if any(self.recompute):
            found["recompute_module_list"] = ",".join(map(str, self.recompute))
            found["recompute_type"] = MODULES.index(self.module)
        if self.schedule not in ("1f1b", "interleaved"):
            found["pipeline_schedule"] = self.schedule
        if self.sizes is not None:
            found["optimized_pipeline"] = True
            found["manual_mbs"] = ",".join(map(str, self.sizes))
        return found

    def flags(self) -> list[str]:
        """The choice as words of a command line."""
        words = []
        for name, value in self.values().items():
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
        return words


def result_of(found: Found, job: Mapping[str, Any]) -> SearchOutcome:
    choice = found.choice
    return SearchOutcome(
        found.mode,
        job,
        choice.layers,
        choice.recompute,
        choice.module,
        choice.kind,
        choice.sizes,
    )


def write_result(path: Path | str, found: Found, job: Mapping[str, Any]) -> SearchOutcome:
    """Write the file, atomically."""
    result = result_of(found, job)
    value = {
        "version": VERSION,
        "mode": result.mode,
        "flags": result.flags(),
        "layers": result.layers,
        "recompute": result.recompute,
        "module": result.module,
        "schedule": result.schedule,
        "sizes": result.sizes,
        "limit": found.limit,
        "before": _figures(found.before),
        "after": _figures(found.after),
        "job": dict(job),
    }
    atomic_write_text(path, json.dumps(value, indent=1) + "\n")
    return result


def _figures(price: Price) -> dict[str, Any]:
    return {"seconds": price.makespan, "bytes": price.peaks, "bubble": price.bubble}


def read_result(path: Path | str) -> SearchOutcome:
    """Read a file that :func:`write_result` wrote.

    Raises:
        ConfigError: it is none; names the file, the field and what is expected.
    """
    where = f"automated pipeline {path}"
    value = read_object(Path(path), ConfigError)
    if missing := [name for name in _FIELDS if name not in value and name != "sizes"]:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    check(value, _FIELDS, where, ConfigError)
    layers = tuple(map(tuple, value["layers"]))
    if not layers or len(set(map(len, layers))) != 1 or len(value["recompute"]) != len(layers):
        raise ConfigError(f"{where}: layers and recompute must have an entry for each rank")
    sizes = value.get("sizes")
    return SearchOutcome(
        value["mode"],
        value["job"],
        layers,
        tuple(value["recompute"]),
        value["module"],
        value["schedule"],
        None if sizes is None else tuple(sizes),
    )
