"""The faults that ``mindspeed compare`` names, as msprobe sees them on the same jobs.

    pip install mindstudio-probe
    python benchmarks/compare_msprobe.py [--only NAME ...] [--out FILE]

Each dense fault of ``tests/compare/faults.py`` that one rank shows in a forward or backward is
planted into a small fp32 job. msprobe dumps statistics of its modules (level ``L0``) and compares
them with those of the job without a fault; its first warning or error is at the guilty module, at
another one, or there is none. What comes first is its table's order, which is that of the step.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import mindspeed.megatron_adaptor  # noqa: F401, before anything of Megatron
from tests.compare.faults import FAULTS

FLAGS = "--global-batch-size 4 --train-iters 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(faults()))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump:
        return dump(args.dump, args.fault)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), args.only)
    counts = Counter(one["first"] for one in found)
    summary = {"msprobe": version(), "planted": len(found), **counts, "faults": found}
    print(json.dumps({k: v for k, v in summary.items() if k != "faults"}))
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1) + "\n")


def faults() -> list[str]:
    """Those that one rank of a dense job shows in a forward or backward."""
    return [
        name
        for name, fault in FAULTS.items()
        if fault.job == "dense"
        and not fault.needs
        and name != "not a number"  # ends the job
        and all(when in ("forward", "backward") for when, _, _ in fault.expected)
    ]


def version() -> str:
    from importlib.metadata import version

    return version("mindstudio-probe")


def measured(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """What msprobe's comparison says of each fault."""
    run(folder / "right", "")
    found = []
    for number, name in enumerate(names):
        wrong = folder / f"wrong-{number}"
        run(wrong, name)
        rows = compared(folder, folder / "right", wrong)
        first = next((row for row in rows if row["Result"] in ("warning", "error")), None)
        where = "" if first is None else first["NPU Name"]
        guilty = [module for _, module, _ in FAULTS[name].expected]
        guilty += ["rotary_pos_emb"] * name.startswith("rotary")
        kind = "nowhere" if first is None else "elsewhere"
        if any(re.search(rf"\b{re.escape(module)}\b", where) for module in guilty):
            kind = "at the module"
        found.append({"fault": name, "first": kind, "warning": where})
        print(f"{kind:14} {name:36} {where}", flush=True)
    return found


def run(folder: Path, fault: str) -> None:
    """Train with msprobe in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    subprocess.run(
        [sys.executable, __file__, "--dump", folder, "--fault", fault],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **rank, "MASTER_PORT": str(port)},
    )


def dump(folder: Path, fault: str) -> None:
    """Train one step and dump it."""
    from msprobe.pytorch import PrecisionDebugger

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain
    from tests.support.trainer_job import command

    debugger = PrecisionDebugger(dump_path=str(folder), task="statistics", level="L0")

    def provider(*given: Any) -> Any:
        planted = FAULTS[fault] if fault else None
        if planted is not None and planted.before is not None:
            planted.before()
        model = gpt_model(*given)
        if planted is not None:
            planted.plant(model, 0)
        debugger.start(model=model)
        return model

    pretrain(_prepare(command(shlex.split(FLAGS)), 1), provider)
    debugger.stop()
    debugger.step()


def compared(folder: Path, right: Path, wrong: Path) -> list[dict[str, str]]:
    """The rows of msprobe's table."""
    from msprobe.pytorch.compare.pt_compare import pt_compare

    target, golden = (next(one.rglob("dump.json")) for one in (wrong, right))
    out = Path(tempfile.mkdtemp(dir=folder))
    pt_compare({"npu_path": str(target), "bench_path": str(golden)}, str(out), xlsx=False)
    with next(out.glob("*.csv")).open(encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
