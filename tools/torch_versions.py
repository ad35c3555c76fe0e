"""Keep the table of PyTorch versions in docs/installation.md: what trains with each of them.

python tools/torch_versions.py             write the table from docs/torch_versions.toml
python tools/torch_versions.py --check     fail where it is out of date
python tools/torch_versions.py --measure   train with the torch of this interpreter, keep what
                                           comes out
python tools/torch_versions.py --measure --only pipeline mla-tensor

Run it with the interpreter of an environment that has the release. Jobs, and what ``equal`` means,
are those of ``tools/megatron_versions.py``: three steps on CPU ranks, against one rank of the same
torch.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib.metadata import version as installed
from pathlib import Path

from feature_table import ROOT, update
from megatron_release import Data, load, store
from megatron_versions import BASE, EQUAL, JOBS, PAGE, Job, table, verdicts
from packaging.requirements import Requirement
from packaging.version import Version

from mindspeed.device.torch_versions import OLDEST, TESTED

DATA = ROOT / "docs" / "torch_versions.toml"
_HEAD = "# What trains with each torch; written by tools/torch_versions.py --measure.\n"
_STACK = {"python": "Python", "megatron-core": "megatron-core", "transformers": "transformers"}


def measure(jobs: Mapping[str, Job]) -> tuple[str, dict[str, str]]:
    """The release of torch in this environment, and what each job does with it."""
    torch = installed("torch").partition("+")[0]
    stack = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "megatron-core": installed("megatron-core"),
        "transformers": installed("transformers"),
    }
    with tempfile.TemporaryDirectory() as scratch:
        return torch, stack | verdicts(f"torch {torch}", jobs, Path(scratch))


def problems(data: Data) -> list[str]:
    """Releases that are not what OLDEST, TESTED and pyproject.toml say of them."""
    trains = [
        Version(release)
        for release, found in data.items()
        if all(found.get(name) == EQUAL for name in BASE)
    ]
    wrong = []
    oldest = ".".join(map(str, min(trains, default=Version("0")).release[:2]))
    if oldest != OLDEST:
        wrong.append(f"OLDEST is {OLDEST}, the oldest that trains is {oldest}")
    if Version(TESTED) not in trains:
        wrong.append(f"TESTED is {TESTED}, which does not do all jobs")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (required,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    if str(required.specifier) != f">={OLDEST}":
        wrong.append(f"pyproject.toml asks for torch{required.specifier}, OLDEST is {OLDEST}")
    constraints = (ROOT / "constraints.txt").read_text()
    if not re.search(rf"^torch=={re.escape(TESTED)}$", constraints, re.MULTILINE):
        wrong.append(f"constraints.txt does not have TESTED, {TESTED}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Measure the torch of this environment, and write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    parser.add_argument("--measure", action="store_true", help="train with this environment")
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=JOBS, default=list(JOBS))
    args = parser.parse_args(arguments)
    if args.measure:
        release, found = measure({name: JOBS[name] for name in args.only})
        data = load(DATA)
        store(DATA, _HEAD, data | {release: data.get(release, {}) | found})
    data = load(DATA)
    for problem in (wrong := problems(data)):
        print(problem, file=sys.stderr)
    tables = {PAGE: {"torch-versions": table(data, _STACK)}}
    outdated = update(tables, "torch_versions", check=args.check)
    return int(bool(wrong or outdated))


if __name__ == "__main__":
    sys.exit(main())
