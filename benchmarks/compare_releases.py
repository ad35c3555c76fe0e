"""Do recordings of two releases of Megatron Core align, and are they equal?

    python benchmarks/compare_releases.py [--releases 0.15.3 0.17.1] [--out FILE]

Small jobs in fp32, dense and with experts, are recorded with the installed release, three times
more with noise, and with each release of PyPI, all beginning with the same weights and data.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from megatron_release import release

from mindspeed.compare.recording import read
from mindspeed.compare.walk import compare
from tests.compare.layouts import JOBS
from tests.support.trainer_job import TINY

ROOT = Path(__file__).parent.parent
KINDS = ("dense", "experts")
NOISE = (1, 2, 3)
STEP = "--global-batch-size 4 --train-iters 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", nargs="+", default=["0.15.3", "0.17.1"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    installed = version("megatron-core")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            job = Job(Path(folder, kind), JOBS[kind].flags)
            for number in NOISE:
                job.record(f"a/noise-{number}", "", f"--record-noise {number}")
            job.record("a", "")
            for other in args.releases:
                with release(other, "") as path:
                    trained = job.record(other, str(path))
                row = {"job": kind, "A": installed, "B": trained, **job.compared(other)}
                print(json.dumps(row), flush=True)
                found.append(row)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


class Job:
    """A small job on one rank.

    Args:
        folder: For weights and recordings.
        flags: Of all runs.
    """

    def __init__(self, folder: Path, flags: str) -> None:
        self._folder, self._flags = folder, f"{flags} {STEP}"
        self._train("", f"--lr 0 --save {folder}/weights")

    def record(self, name: str, megatron: str, more: str = "") -> str:
        """Record a run with the Megatron in a directory, or the installed one; its version."""
        load = f"--load {self._folder}/weights --finetune --no-load-optim --no-load-rng"
        self._train(megatron, f"{load} {more} --record {self._folder / name}")
        return self._python(megatron, "-c", "import megatron.core as m; print(m.__version__)")

    def compared(self, name: str) -> dict[str, Any]:
        """What a comparison with the installed release says."""
        noise = [read(self._folder / "a" / f"noise-{number}") for number in NOISE]
        result = compare(read(self._folder / "a"), read(self._folder / name), noise)
        only = {run: [str(name) for name in names] for run, names in result.only.items()}
        return {
            "equal": result.equal,
            "tensors": len(result.rows),
            "in bits": sum(row.difference.error == 0 for row in result.rows),
            "before": result.before,
            "in one only": only,
        }

    def _train(self, megatron: str, flags: str) -> None:
        words = [*TINY, *shlex.split(f"{self._flags} {flags}")]
        self._python(megatron, "-m", "mindspeed", "pretrain", *words)

    def _python(self, megatron: str, *words: str) -> str:
        """The last line that a process prints which finds a Megatron first."""
        path = os.pathsep.join(filter(None, (megatron, str(ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "MINDSPEED_ALLOW_UNTESTED": "1"},
        )
        return done.stdout.strip().rpartition("\n")[2]


if __name__ == "__main__":
    main()
