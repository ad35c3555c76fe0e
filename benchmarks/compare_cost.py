"""What recording costs: seconds of steps with and without ``--record``, wall and processor's.

    python benchmarks/compare_cost.py [--hidden 1024] [--steps 6] [--out FILE]

Trains a LLaMA-like model of two layers and records every second step, so that both kinds of steps
run under the same conditions. Prints the median of each and the ratio, what a recorded step writes,
and the seconds of a step of the same job without the flag. Processor seconds, which other programs
on the machine disturb less, are those of whole runs: with the flag, without, and a short one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help="recorded ones")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorded = range(3, 3 + 2 * args.steps, 2)
        iterations = 3 + 2 * args.steps
        record = ["--record", f"{folder}/run", "--record-steps", *map(str, recorded)]
        seconds, recording = train(args, folder, iterations, record)
        bare, without = train(args, folder, iterations, [])
        _, start = train(args, folder, 3, [])
        written = {
            path.name: sum(file.stat().st_size for file in path.iterdir())
            for path in sorted(Path(folder, "run").glob("step-*"))
        }
    found = {
        "hidden": args.hidden,
        "sequence": args.sequence,
        "dtype": "bf16" if args.bf16 else "fp32",
        "recorded": statistics.median(seconds[at] for at in recorded),
        "between": statistics.median(seconds[at + 1] for at in recorded if at + 1 < iterations),
        "without the flag": statistics.median(bare[3:]),
        "bytes of a step": next(iter(written.values())),
    }
    found["recorded / between"] = found["recorded"] / found["between"]
    found["processor seconds of a step"] = (without - start) / (iterations - 3)
    found["of recording it"] = (recording - without) / args.steps
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def train(
    args: argparse.Namespace, folder: str, iterations: int, flags: list[str]
) -> tuple[list[float], float]:
    """Seconds of each step, and processor seconds of the run."""
    metrics = Path(folder, "metrics.jsonl")
    metrics.unlink(missing_ok=True)
    before = os.times()
    hidden, length = args.hidden, args.sequence
    job = (
        f"--num-layers 2 --hidden-size {hidden} --ffn-hidden-size {hidden * 11 // 4} "
        f"--num-attention-heads {hidden // 64} --swiglu --normalization RMSNorm "
        "--position-embedding-type rope --untie-embeddings-and-output-weights "
        "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 "
        f"--seq-length {length} --micro-batch-size 2 --global-batch-size 2 --lr 1e-4 "
        f"--train-iters {iterations} --mock-data --tokenizer-type NullTokenizer --vocab-size 8000 "
        f"--log-interval 1 --metrics-file {metrics}"
    ).split()
    subprocess.run(
        [sys.executable, "-m", "mindspeed", "pretrain", *job, *flags, *["--bf16"] * args.bf16],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    each = [one["seconds_per_iteration"] for one in records if "seconds_per_iteration" in one]
    return each, used


if __name__ == "__main__":
    main()
