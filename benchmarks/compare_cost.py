"""What recording costs: processor seconds of steps with and without ``--record``.

    python benchmarks/compare_cost.py [--hidden 1024] [--micro-batches 1 4] [--steps 6] [--out FILE]

Trains a LLaMA-like model of two layers, of 2,048 tokens a micro-batch, and records every second
step. A step that is recorded has the steps before and after it as its pair, so that what else the
machine does disturbs both; the figure is the median of the pairs' ratios. Also printed: what a
recorded step writes, and the seconds of a step of the same job without the flag.
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
from typing import Any

PROCESSOR_SECONDS = (
    "import sys, time; time.perf_counter = time.process_time; "
    "from mindspeed.cli.main import main; sys.exit(main())"
)
"""A command whose log tells the seconds of the processor."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=6, help="recorded ones")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [measured(args, count) for count in args.micro_batches]
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(args: argparse.Namespace, micro_batches: int) -> dict[str, Any]:
    """The cost of recording a step of so many micro-batches."""
    recorded = range(3, 3 + 2 * args.steps, 2)
    iterations = recorded[-1] + 2
    with tempfile.TemporaryDirectory() as folder:
        record = ["--record", f"{folder}/run", "--record-steps", *map(str, recorded)]
        seconds = train(args, folder, micro_batches, iterations, record)
        bare = train(args, folder, micro_batches, 6, [])
        written = sorted(
            sum(file.stat().st_size for file in path.iterdir())
            for path in Path(folder, "run").glob("step-*")
        )
    pairs = [seconds[at] / (seconds[at - 1] + seconds[at + 1]) * 2 for at in recorded]
    return {
        "hidden": args.hidden,
        "tokens": micro_batches * 2 * args.sequence,
        "micro-batches": micro_batches,
        "dtype": "bf16" if args.bf16 else "fp32",
        "recorded": round(statistics.median(seconds[at] for at in recorded), 3),
        "between": round(statistics.median(seconds[at + 1] for at in recorded), 3),
        "without the flag": round(statistics.median(bare[3:]), 3),
        "recorded / between": round(statistics.median(pairs), 4),
        "of pairs": [round(one, 4) for one in sorted(pairs)],
        "bytes of a step": written[-1],
    }


def train(
    args: argparse.Namespace, folder: str, micro_batches: int, iterations: int, flags: list[str]
) -> list[float]:
    """Processor seconds of each step."""
    metrics = Path(folder, "metrics.jsonl")
    metrics.unlink(missing_ok=True)
    hidden, length = args.hidden, args.sequence
    job = (
        f"--num-layers 2 --hidden-size {hidden} --ffn-hidden-size {hidden * 11 // 4} "
        f"--num-attention-heads {hidden // 64} --swiglu --normalization RMSNorm "
        "--position-embedding-type rope --untie-embeddings-and-output-weights "
        "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 "
        f"--seq-length {length} --micro-batch-size 2 --global-batch-size {2 * micro_batches} "
        f"--lr 1e-4 --train-iters {iterations} --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size 8000 --log-interval 1 --metrics-file {metrics}"
    ).split()
    subprocess.run(
        [
            sys.executable,
            "-c",
            PROCESSOR_SECONDS,
            "pretrain",
            *job,
            *flags,
            *["--bf16"] * args.bf16,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [one["seconds_per_iteration"] for one in records if "seconds_per_iteration" in one]


if __name__ == "__main__":
    main()
