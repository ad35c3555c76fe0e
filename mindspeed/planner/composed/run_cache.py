"""Tiny runs on disk, so that a search goes on where the last one ended.

    cache = RunCache(directory, job, cluster)
    found = cache.get(point) ; cache.put(point, run)

A file is named by the digest of everything that a run depends on: versions of Python packages, the
code of mindspeed, the program and flags of the job, the flags of the run, and the cluster. So it is
never stale; a file that cannot be read is a run that was not made. Files are JSON, written in one
step.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindspeed.files import atomic_write_text, make_dirs
from mindspeed.parsing import decode_json
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed.layer_run import LayerRun
from mindspeed.planner.composed.tiny_run import ActionRun, Point, TinyRun
from mindspeed.planner.job import Job

_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine", "triton", "torch-npu")
_COUNTERS = ("static", "collectives", "messages", "closing", "exposed")


class RunCache:
    """Runs of one job on one cluster, in memory and, with a directory, on disk.

    Args:
        directory: is made; None: nothing is written.
        job: whose runs they are.
        cluster: of their times.
    """

    def __init__(self, directory: str | Path | None, job: Job, cluster: Cluster | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._known: dict[str, TinyRun] = {}
        self._layers: dict[str, LayerRun] = {}
        machine = None if cluster is None else cluster.to_json()
        program = [type(job).__name__, job.argv, _program(job)]
        self._base = json.dumps([_code(), program, machine], sort_keys=True, default=str)
        if self._directory is not None:
            make_dirs(self._directory)
        self.hits = self.misses = 0

    def get(self, point: Point) -> TinyRun | None:
        """The run of a point; None if it was not made."""
        name = self._name(point)
        found = self._known.get(name) or self._read(name)
        self.hits += found is not None
        self.misses += found is None
        if found is not None:
            self._known[name] = found
        return found

    def put(self, point: Point, run: TinyRun) -> None:
        """Keep a run."""
        name = self._name(point)
        self._known[name] = run
        self._write(name, _values(run))

    def layer(self, point: Point) -> LayerRun | None:
        """The run of a layer; None if it was not made."""
        name = self._name(point, "layer")
        found = self._layers.get(name)
        if found is None and self._directory is not None:
            found = self._layer_in(self._directory / f"{name}.json")
        self.hits += found is not None
        self.misses += found is None
        if found is not None:
            self._layers[name] = found
        return found

    def put_layer(self, point: Point, run: LayerRun) -> None:
        """Keep the run of a layer."""
        name = self._name(point, "layer")
        self._layers[name] = run
        self._write(name, asdict(run))

    @staticmethod
    def _layer_in(path: Path) -> LayerRun | None:
        try:
            values = decode_json(path.read_text("utf-8"))
            return LayerRun(*(float(values[item.name]) for item in fields(LayerRun)))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        if self._directory is not None:
            atomic_write_text(self._directory / f"{name}.json", json.dumps(values) + "\n")

    def _name(self, point: Point, kind: str = "") -> str:
        given = {name: value for name, value in point.overrides.items() if value is not None}
        absent = sorted(name for name, value in point.overrides.items() if value is None)
        what = json.dumps([given, absent, point.devices, point.stage], sort_keys=True, default=str)
        return hashlib.sha256((self._base + what + kind).encode()).hexdigest()[:40]

    def _read(self, name: str) -> TinyRun | None:
        if self._directory is None:
            return None
        try:
            return _run_of(decode_json((self._directory / f"{name}.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None


def _values(run: TinyRun) -> dict[str, Any]:
    """A run as JSON."""
    found = {item.name: getattr(run, item.name) for item in fields(run)}
    return {**found, "actions": [asdict(action) for action in run.actions]}


def _run_of(values: Mapping[str, Any]) -> TinyRun:
    """A run from its JSON.

    Raises:
        KeyError, TypeError: the fields are others.
    """
    found: dict[str, Any] = {item.name: values[item.name] for item in fields(TinyRun)}
    for name in _COUNTERS:
        found[name] = Counter(found[name])
    found["actions"] = tuple(ActionRun(**action) for action in found["actions"])
    return TinyRun(**found)


@lru_cache(maxsize=1)
def _code() -> str:
    """Digest of the code and the versions that a count depends on."""
    import mindspeed

    digest = hashlib.sha256(platform.python_version().encode())
    for name in _PACKAGES:
        try:
            digest.update(f"{name} {version(name)}".encode())
        except PackageNotFoundError:
            continue
    root = Path(mindspeed.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _program(job: Job) -> list[str]:
    """Digests of a script and of the modules next to it, whose model is counted."""
    script = getattr(job, "_script", None)
    if script is None:
        return []
    files = sorted(Path(script.path).resolve().parent.glob("*.py"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
