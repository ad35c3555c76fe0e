"""How long ``mindspeed check --types`` takes for published models on 2,048 ranks, in processes.

    python benchmarks/type_check.py [--repeats 3] [--json out.json]

Wall-clock and processor seconds of the whole command, the best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time

JOBS = {
    "llama3-70b": "--model llama3-70b --bf16 --nproc 2048 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --sequence-parallel --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 1024",
    "deepseek-v3": "--config deepseek-v3 --devices 2048",
}


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes of each kind")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    check = [sys.executable, "-m", "mindspeed", "check", "--types"]
    commands = {name: [*check, *shlex.split(flags)] for name, flags in JOBS.items()}
    figures = {name: best(command, args.repeats) for name, command in commands.items()}
    for name, (wall, processor) in figures.items():
        print(f"{name:14} {wall:6.1f} s, {processor:6.1f} s of the processors")
    if args.json:
        found = {
            name: dict(zip(("wall", "cpu"), each, strict=True)) for name, each in figures.items()
        }
        with open(args.json, "w") as file:
            json.dump({"cores": os.cpu_count(), "seconds": found}, file, indent=2)
            file.write("\n")


def best(command: list[str], repeats: int) -> tuple[float, float]:
    """Wall-clock and processor seconds of the fastest of the repeats."""
    return min(once(command) for _ in range(repeats))


def once(command: list[str]) -> tuple[float, float]:
    """Wall-clock and processor seconds of the command with its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(wall, 1), round(used, 1)


if __name__ == "__main__":
    main()
