"""Cache of recordings on disk, so that a search goes on where the last one ended.

    cache = RunCache(directory, job, cluster)
    found = cache.get(point) ; cache.put(point, recording)

A file is named by the digest of everything that a run depends on: versions of Python packages, the
code of mindspeed, the program and flags of the job, the flags of the run, and the cluster. So it is
never stale; a file that cannot be read counts as missing. Files are JSON, written atomically.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindspeed.files import atomic_write_text, make_dirs
from mindspeed.parsing import decode_json
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.count.layer_run import LayerRun
from mindspeed.planner.count.recording import Point, Recording, json_of, recording_of
from mindspeed.planner.job import Job

_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine", "triton", "torch-npu")


class RunCache:
    """Runs of one job on one cluster, in memory and, with a directory, on disk.

    Args:
        directory: directory of the files, created if missing; None: nothing is written.
        cluster: rates that the runs are timed with.

    Attributes:
        misses: requested runs that were not there.
    """

    def __init__(self, directory: str | Path | None, job: Job, cluster: Cluster | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._job = job
        self._others: dict[str, RunCache] = {}
        self._known: dict[str, Any] = {}
        machine = None if cluster is None else cluster.to_json()
        program = [type(job).__name__, job.argv, asdict(job.loads), _program(job)]
        self._base = json.dumps([_code(), program, machine], sort_keys=True, default=str)
        if self._directory is not None:
            make_dirs(self._directory)
        self.misses = 0

    def on(self, cluster: Cluster) -> RunCache:
        """The cache of the same job on another cluster, such as one kind of several."""
        name = json.dumps(cluster.to_json(), sort_keys=True)
        if name not in self._others:
            self._others[name] = RunCache(self._directory, self._job, cluster)
        return self._others[name]

    def get(self, point: Point) -> Recording | None:
        """The recording of a point; None if there is none."""
        found: Recording | None = self._get(_name(self._base, point), recording_of)
        return found

    def put(self, point: Point, recording: Recording) -> None:
        """Store a recording."""
        self._put(_name(self._base, point), recording, json_of(recording))

    def layer(self, point: Point) -> LayerRun | None:
        """The run of a layer; None if there is none."""
        name = _name(self._base, point, "layer")
        found: LayerRun | None = self._get(name, lambda values: LayerRun(**values))
        return found

    def put_layer(self, point: Point, run: LayerRun) -> None:
        """Store the run of a layer."""
        self._put(_name(self._base, point, "layer"), run, asdict(run))

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


def _name(base: str, point: Point, kind: str = "recording") -> str:
    given = {name: value for name, value in point.overrides.items() if value is not None}
    absent = sorted(name for name, value in point.overrides.items() if value is None)
    where = [point.devices, point.stage, point.forward, point.bare]
    what = json.dumps([given, absent, *where], sort_keys=True, default=str)
    return hashlib.sha256((base + what + kind).encode()).hexdigest()[:40]


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
