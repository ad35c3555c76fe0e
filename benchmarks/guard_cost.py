"""What guards cost: seconds of a step with each, and of one in which ``bitflip`` computes twice.

    python benchmarks/guard_cost.py [--hidden 1024] [--steps 8] [--out FILE]

Trains the model of ``compare_cost.py`` on one rank. ``desync`` and ``bitflip`` look at every second
step, so that both kinds of steps run under the same conditions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from compare_cost import train

GUARDS = ("", "nan", "nan,spike", "desync", "bitflip")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for guard in GUARDS:
        flags = ["--guard", guard, "--guard-interval", "2"] if guard else []
        with tempfile.TemporaryDirectory() as folder:
            seconds = train(args, folder, 1, 3 + args.steps, flags)[2:]
        for name, part in (("looked at", seconds[::2]), ("between", seconds[1::2])):
            found[f"{guard or 'none'}, {name}"] = statistics.median(part)
    base = statistics.median([found["none, looked at"], found["none, between"]])
    table = {name: {"seconds": one, "ratio": one / base} for name, one in found.items()}
    print(json.dumps(table, indent=1))
    if args.out:
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
