"""Cache of tiny runs on disk, so that a search goes on where the last one ended.

    cache = RunCache(directory, job, cluster)
    found = cache.get(point) ; cache.put(point, run)

A file is named by the digest of everything that a run depends on: versions of Python packages, the
code of mindspeed, the program and flags of the job, the flags of the run, and the cluster. So it is
never stale; a file that cannot be read counts as missing. Files are JSON, written atomically.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindspeed.files import atomic_write_text, make_dirs
from mindspeed.parsing import decode_json
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed.figures import Figure, Quantity
from mindspeed.planner.composed.layer_run import LayerRun
from mindspeed.planner.composed.tiny_run import ActionRun, Point, TinyRun
from mindspeed.planner.count.recording import Point as RecordedPoint
from mindspeed.planner.count.recording import Recording, json_of, recording_of
from mindspeed.planner.job import Job

_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine", "triton", "torch-npu")


class RunCache:
    """Runs of one job on one cluster, in memory and, with a directory, on disk.

    Args:
        directory: directory of the files, created if missing; None: nothing is written.
        job: the job.
        cluster: rates that the runs are timed with.

    Attributes:
        misses: requested runs that were not there.
    """

    def __init__(self, directory: str | Path | None, job: Job, cluster: Cluster | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._known: dict[str, Any] = {}
        machine = None if cluster is None else cluster.to_json()
        program = [type(job).__name__, job.argv, _program(job)]
        self._base = json.dumps([_code(), program, machine], sort_keys=True, default=str)
        if self._directory is not None:
            make_dirs(self._directory)
        self.misses = 0

    def get(self, point: Point) -> TinyRun | None:
        """The run of a point; None if there is none."""
        found: TinyRun | None = self._get(self._name(point), _run_of)
        return found

    def put(self, point: Point, run: TinyRun) -> None:
        """Store a run."""
        self._put(self._name(point), run, _values(run))

    def layer(self, point: Point) -> LayerRun | None:
        """The run of a layer; None if there is none."""
        found: LayerRun | None = self._get(self._name(point, "layer"), _layer_run_of)
        return found

    def put_layer(self, point: Point, run: LayerRun) -> None:
        """Store the run of a layer."""
        self._put(self._name(point, "layer"), run, asdict(run))

    @property
    def recordings(self) -> Recordings:
        """The recordings of the job."""
        return Recordings(self)

    def _get(self, name: str, parse: Callable[[Mapping[str, Any]], Any]) -> Any:
        if name not in self._known and self._directory is not None:
            with suppress(OSError, ValueError, TypeError, KeyError):
                text = (self._directory / f"{name}.json").read_text("utf-8")
                self._known[name] = parse(decode_json(text))
        self.misses += name not in self._known
        return self._known.get(name)

    def _put(self, name: str, run: Any, values: Mapping[str, Any]) -> None:
        self._known[name] = run
        if self._directory is not None:
            atomic_write_text(self._directory / f"{name}.json", json.dumps(values) + "\n")

    def _name(self, point: Point | RecordedPoint, kind: str = "") -> str:
        given = {name: value for name, value in point.overrides.items() if value is not None}
        absent = sorted(name for name, value in point.overrides.items() if value is None)
        what = json.dumps([given, absent, point.devices, point.stage], sort_keys=True, default=str)
        return hashlib.sha256((self._base + what + kind).encode()).hexdigest()[:40]


@dataclass(frozen=True)
class Recordings:
    """Recordings of a cache."""

    cache: RunCache

    def get(self, point: RecordedPoint) -> Recording | None:
        """The recording of a point; None if there is none."""
        name = self._name(point)
        found: Recording | None = self.cache._get(name, recording_of)
        return found

    def put(self, point: RecordedPoint, recording: Recording) -> None:
        """Store a recording."""
        self.cache._put(self._name(point), recording, json_of(recording))

    def _name(self, point: RecordedPoint) -> str:
        kind = "between steps" if not point.forward else "bare" if point.bare else "recording"
        return self.cache._name(point, kind)


def _values(run: TinyRun) -> dict[str, Any]:
    """A run as JSON."""
    found = {item.name: getattr(run, item.name) for item in fields(run)}
    found["actions"] = [asdict(action) for action in run.actions]
    found["communication"] = [
        [figure.quantity.value, *figure[1:], value] for figure, value in run.communication.items()
    ]
    return found


def _run_of(values: Mapping[str, Any]) -> TinyRun:
    """A run from its JSON."""
    found: dict[str, Any] = {item.name: values[item.name] for item in fields(TinyRun)}
    found["static"] = Counter(found["static"])
    found["actions"] = tuple(ActionRun(**action) for action in found["actions"])
    found["communication"] = Counter(
        {Figure(Quantity(name), *rest): value for name, *rest, value in found["communication"]}
    )
    return TinyRun(**found)


def _layer_run_of(values: Mapping[str, Any]) -> LayerRun:
    return LayerRun(*(float(values[item.name]) for item in fields(LayerRun)))


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
    """Digests of the job's script, if it has one, and of the modules next to it."""
    script = getattr(job, "_script", None)
    if script is None:
        return []
    files = sorted(Path(script.path).resolve().parent.glob("*.py"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
