"""What a plan costs: seconds of searches and checks of whole jobs, as a user starts them.

    python benchmarks/planner_cost.py [--only NAME] [--json FILE]

Every command starts in a process of its own, without a cache, and counts in one for each core. Wall
time is that of an idle machine; seconds of the processor are those of all these processes. The
package has its bytecode, as pip installs it: compiling it takes half a second.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mindspeed

RESULTS = Path(__file__).parent / "results" / "planner-cost.json"
DENSE = "--bf16 --use-distributed-optimizer"
BIG = "--model llama3-70b --bf16 --seq-length 8192 --global-batch-size 1024"
COMMANDS = {
    "search llama3-70b, 1,024 devices": (
        f"plan --cluster h100 --devices 1024 -- {BIG} --use-distributed-optimizer"
    ),
    "search qwen2.5-32b, 64 devices": (
        "plan --cluster h100 --devices 64 -- "
        f"--model qwen2.5-32b {DENSE} --seq-length 4096 --global-batch-size 256"
    ),
    "search qwen3-30b-a3b, 64 devices": (
        "plan --cluster h100 --devices 64 -- "
        f"--model qwen3-30b-a3b {DENSE} --seq-length 4096 --global-batch-size 512"
    ),
    "check llama3-70b, 1,024 devices": (
        f"plan --check --cluster h100 --devices 1024 -- {BIG} --use-distributed-optimizer "
        "--micro-batch-size 1 --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 8"
    ),
    "check deepseek-v3, 2,048 devices": (
        "plan --check --cluster h100 --devices 2048 -- --config deepseek-v3"
    ),
}


def measure(words: str) -> dict[str, Any]:
    """Run a command.

    Args:
        words: of ``mindspeed``.

    Returns:
        its seconds: ``wall``, and ``cpu`` of all its processes.

    Raises:
        RuntimeError: it failed.
    """
    before, start = os.times(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed", *words.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    after = os.times()
    if done.returncode:
        raise RuntimeError(f"{words}: status {done.returncode}\n{done.stderr[-2000:]}")
    cpu = sum(after[2:4]) - sum(before[2:4])
    return {
        "command": f"mindspeed {words}",
        "wall_seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(cpu, 1),
        "said": [line for line in done.stdout.splitlines() if "signatures" in line][:1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(COMMANDS), help="one of the commands")
    parser.add_argument("--json", metavar="FILE", type=Path, default=RESULTS)
    own = parser.parse_args()
    compileall.compile_dir(Path(mindspeed.__file__).parent, quiet=1)
    names = [own.only] if own.only else list(COMMANDS)
    found = json.loads(own.json.read_text()) if own.json.exists() else {"commands": {}}
    found["machine"] = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    for name in names:
        found["commands"][name] = one = measure(COMMANDS[name])
        print(f"{name}: {one['wall_seconds']} s, {one['cpu_seconds']} s of the processor")
        own.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
