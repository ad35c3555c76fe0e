"""Keep the table of PyTorch versions in docs/installation.md: what trains with each of them.

python tools/torch_versions.py             write the table from docs/torch_versions.toml
python tools/torch_versions.py --check     fail where it is out of date
python tools/torch_versions.py --measure   train with the torch of this interpreter, keep what
                                           comes out
python tools/torch_versions.py --measure --only pipeline mla-tensor

Run it with the interpreter of an environment that has the release. A Python or a Megatron other
than that of constraints.txt makes a column of its own; 3.10 needs a ``tomllib`` on ``PYTHONPATH``
that does ``from tomli import *``. Jobs, and what ``equal`` means, are those of
``tools/megatron_versions.py``: three steps on CPU ranks, against one rank of the same torch.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version as installed
from pathlib import Path

from feature_table import ROOT, update
from feature_table import load as load_page_data
from megatron_release import Data, load, store
from megatron_versions import BASE, EQUAL, JOBS, PAGE, table, verdicts
from packaging.requirements import Requirement
from packaging.version import Version

from mindspeed.device.torch_versions import OLDEST, TESTED
from tests.npu_emulator import wheel
from tests.support.wheels import WheelUnavailable

DATA = ROOT / "docs" / "torch_versions.toml"
_HEAD = "# What trains with each torch; written by tools/torch_versions.py --measure.\n"
_STACK = {
    "python": "Python",
    "megatron-core": "megatron-core",
    "transformers": "transformers",
    "torch_npu": "torch_npu, emulated",
}
_EMULATOR = "tests/npu_emulator"
NPU = {
    "npu": (
        "emulated NPU: device, collectives, allocator, states, schemas",
        *(_EMULATOR, f"--deselect={_EMULATOR}/test_operators.py"),
        f"--deselect={_EMULATOR}/test_training.py",
    ),
    "npu-operators": (
        "emulated NPU: operators, and what runs without one of torch_npu's",
        *(f"{_EMULATOR}/test_operators.py", "tests/ops/test_attention_npu.py"),
        *("tests/ops/test_groups_on_npu.py", "tests/ops/test_moe_permutation.py"),
        *("tests/ops/test_ring_attention_update.py", "tests/ops/test_strided.py"),
    ),
    "npu-training": (
        "emulated NPU: context and tensor parallelism, training of Megatron",
        *("tests/attention/test_on_npu.py", "tests/tensor_parallel/test_on_npu.py"),
        f"{_EMULATOR}/test_training.py",
    ),
}
"""What is tested with the torch_npu of the emulator: in words, and arguments of pytest."""
ALL = [*JOBS, *NPU]
PASSES = "passes"
PINNED = ("python", "megatron-core")
"""What makes a column of its own where it is not that of constraints.txt."""


def measure(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The name of this environment's column, and what each job and test does there."""
    torch = installed("torch").partition("+")[0]
    stack = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "megatron-core": installed("megatron-core"),
        "transformers": installed("transformers"),
    }
    with tempfile.TemporaryDirectory() as scratch:
        jobs = {name: JOBS[name] for name in names if name in JOBS}
        verdict = verdicts(f"torch {torch}", jobs, Path(scratch)) if jobs else {}
    stack["torch_npu"], can = _emulated()
    for name in NPU.keys() & set(names):
        verdict[name] = pytest_verdict(NPU[name][1:]) if can else stack["torch_npu"]
        print(f"torch {torch} {name}: {verdict[name]}", flush=True)
    others = [f", {_STACK[name]} {stack[name]}" for name in PINNED if stack[name] != _pin(name)]
    return "".join([torch, *others]), stack | verdict


def _emulated() -> tuple[str, bool]:
    """The torch_npu that the emulator runs here, or why there is none; whether there is one."""
    try:
        return wheel.version(), True
    except WheelUnavailable as reason:
        return str(reason), False


def pytest_verdict(
    arguments: Sequence[str], python: Path = Path(sys.executable), workers: int = 0
) -> str:
    """What tests say: :data:`PASSES`, or which failed.

    Args:
        arguments: of pytest.
        python: interpreter of an environment.
        workers: processes beside pytest's own.
    """
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
    done = subprocess.run([*pytest, *arguments], cwd=ROOT, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\S+)", done.stdout, re.M)
    if done.returncode or failed:
        return f"failed: {', '.join(failed) or done.stdout[-200:]}"
    return PASSES


def _pin(name: str) -> str:
    """The release of constraints.txt."""
    pattern = r"^# .* Python (\d+\.\d+)" if name == "python" else rf"^{name}==(\S+)$"
    return str(re.findall(pattern, (ROOT / "constraints.txt").read_text(), re.M)[0])


def problems(data: Data) -> list[str]:
    """Releases that are not what OLDEST, TESTED and pyproject.toml say of them."""
    trains = [
        Version(column.partition(",")[0])
        for column, found in data.items()
        if all(found.get(name) == EQUAL for name in BASE)
    ]
    wrong = []
    oldest = ".".join(map(str, min(trains, default=Version("0")).release[:2]))
    if oldest != OLDEST:
        wrong.append(f"OLDEST is {OLDEST}, the oldest that trains is {oldest}")
    if Version(TESTED) not in trains:
        wrong.append(f"TESTED is {TESTED}, which does not do all jobs")
    project = load(ROOT / "pyproject.toml")["project"]
    (required,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    if str(required.specifier) != f">={OLDEST}":
        wrong.append(f"pyproject.toml asks for torch{required.specifier}, OLDEST is {OLDEST}")
    if _pin("torch") != TESTED:
        wrong.append(f"constraints.txt does not have TESTED, {TESTED}")
    return wrong


def unsaid(data: Data) -> list[str]:
    """What docs/versions.toml says otherwise."""
    (said,) = load_page_data("versions.toml")["version"]
    measured = {
        "torch": {column.partition(",")[0] for column in data},
        "python": {found["python"] for found in data.values()},
    }
    return [
        f"docs/versions.toml: {name} is {said[name]!r}, measured: {', '.join(sorted(versions))}"
        for name, versions in measured.items()
        if set(re.findall(r"\d+(?:\.\d+)+", said[name])) != versions
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure the torch of this environment, and write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    parser.add_argument("--measure", action="store_true", help="train with this environment")
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=ALL, default=ALL)
    args = parser.parse_args(arguments)
    if args.measure:
        column, found = measure(args.only)
        data = load(DATA)
        store(DATA, _HEAD, data | {column: data.get(column, {}) | found})
    data = load(DATA)
    for problem in (wrong := problems(data) + unsaid(data)):
        print(problem, file=sys.stderr)
    rows = table(data, _STACK, {name: shown for name, (shown, *_) in NPU.items()})
    tables = {PAGE: {"torch-versions": rows}}
    outdated = update(tables, "torch_versions", check=args.check)
    return int(bool(wrong or outdated))


if __name__ == "__main__":
    sys.exit(main())
