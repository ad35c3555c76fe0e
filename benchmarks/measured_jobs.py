"""Training steps on this machine's device, beside what the planner says of the same jobs.

    python benchmarks/measured_jobs.py measure results/h200-jobs.json      # on the device
    python benchmarks/measured_jobs.py compare results/h200-jobs.json --cluster h200      # anywhere

``measure`` trains each job for some steps, each in a process of its own, one after the other (the
next one imports meanwhile), and writes the median seconds of a step and the most bytes allocated.
``compare`` plans the same command lines and prints the errors of tokens/s (positive: predicted too
fast) and of bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

STEPS, LEFT_OUT = 10, 4
COMMON = (
    f"--bf16 --use-distributed-optimizer --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu "
    f"--use-fused-rotary-pos-emb --cross-entropy-loss-fusion --cross-entropy-fusion-impl native "
    f"--mock-data --tokenizer-type NullTokenizer --lr 1e-5 --train-iters {STEPS} --log-interval 1 "
    f"--eval-iters 0 --num-workers 0"
)
DENSE = (
    ("qwen2.5-0.5b", 4096, 4), ("qwen2.5-1.5b", 4096, 2), ("qwen3-0.6b", 4096, 4),
    ("qwen3-1.7b", 4096, 2), ("llama3.2-1b", 2048, 4), ("llama3.2-1b", 4096, 2),
    ("llama3.2-1b", 8192, 1), ("llama3.2-1b", 16384, 1), ("llama3.2-1b", 32768, 1),
    ("qwen2.5-3b", 4096, 1), ("llama3.2-3b", 4096, 1), ("llama3.2-3b", 8192, 1),
    ("qwen3-4b", 4096, 1),
)  # fmt: skip
LAYERS = (("llama3-8b", 8, 8192), ("qwen3-14b", 6, 4096), ("llama3-70b", 2, 8192))
VARIANTS = {
    "recomputed": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "norms and activations recomputed": "--recompute-norm --recompute-activation-function",
    "attention swapped": "--swap-attention",
    "16 samples": "--global-batch-size 16",
    "one sample": "--global-batch-size 1",
}


def jobs() -> Iterator[tuple[str, str]]:
    """Name and flags of every job."""
    for model, length, size in DENSE:
        yield f"{model} {length}", _flags(model, length, size)
    for model, layers, length in LAYERS:
        yield f"{model} {layers} layers", _flags(model, length, 1) + f" --num-layers {layers}"
    for name, flags in VARIANTS.items():
        yield f"llama3.2-1b 4096 {name}", _flags("llama3.2-1b", 4096, 1) + f" {flags}"
    moe = "--num-layers 4 --moe-grouped-gemm --use-fused-moe-token-permute-and-unpermute"
    yield "qwen3-30b-a3b 4 layers", _flags("qwen3-30b-a3b", 4096, 1) + f" {moe}"


def _flags(model: str, length: int, size: int) -> str:
    batch = f"--micro-batch-size {size} --global-batch-size {4 * size}"
    return f"--model {model} --seq-length {length} {batch}"


def measure(path: Path, chosen: list[str]) -> None:
    """Train and write the figures of each job as soon as it has them."""
    found: dict[str, Any] = {"device": "", "torch": "", "jobs": {}}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

        def run(name: str, flags: str) -> tuple[str, str, dict[str, Any]]:
            command = [sys.executable, __file__, "train", f"{folder}/turn", *COMMON.split()]
            done = subprocess.run(
                [*command, *flags.split()], capture_output=True, text=True, check=False
            )
            lines = (done.stdout + done.stderr).strip().splitlines()
            try:
                return name, flags, json.loads(lines[-1])
            except (ValueError, IndexError):
                return name, flags, {"error": "\n".join(lines[-4:])}

        asked = [one for one in jobs() if not chosen or any(word in one[0] for word in chosen)]
        for name, flags, figures in pool.map(lambda one: run(*one), asked):
            found["device"] = figures.pop("device", found["device"])
            found["torch"] = figures.pop("torch", found["torch"])
            found["jobs"][name] = {"flags": flags, **figures}
            print(name, figures, flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")


def train(turn: str, flags: list[str]) -> None:
    """One job; prints its figures as JSON."""
    import torch

    import mindspeed.megatron_adaptor  # noqa: F401  before anything of Megatron
    from mindspeed import device
    from mindspeed.cli.main import main
    from mindspeed.training import pretrain  # noqa: F401  before its turn comes

    metrics = Path(f"{turn}-{os.getpid()}.jsonl")
    with open(turn, "w") as lock, contextlib.redirect_stdout(io.StringIO()):
        fcntl.flock(lock, fcntl.LOCK_EX)
        code = main(["pretrain", *flags, "--metrics-file", str(metrics)])
    if code:
        sys.exit(code)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [row["seconds_per_iteration"] for row in rows[LEFT_OUT:]]
    figures = {
        "seconds": median(seconds),
        "spread": (max(seconds) - min(seconds)) / median(seconds),
        "tokens_per_second": rows[-1]["tokens_per_second"],
        "peak": round(max(row["memory_gb"] for row in rows) * 1e9),
        "device": device.current().properties().name,
        "torch": torch.__version__,
    }
    print(json.dumps(figures))


def compare(path: Path, cluster: str) -> None:
    """Print, and add to the file, what the planner says."""
    found = json.loads(path.read_text())

    def plan(job: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, "-m", "mindspeed", "plan", "--check", "--json"]
        words = [*command, "--cluster", cluster, "--", *COMMON.split(), *job["flags"].split()]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if not done.stdout.startswith("{"):
            return {"plan_error": done.stderr[-1000:]}
        planned = json.loads(done.stdout)
        peak = max(rank["peak"] for rank in planned["ranks"])
        return {"planned_seconds": planned["modelled_seconds"], "planned_peak": peak}

    measured = {name: job for name, job in found["jobs"].items() if "error" not in job}
    errors, bytes_off = [], []
    print(f"{'job':<52}{'step s':>9}{'planned':>9}{'error':>8}{'GB':>9}{'planned':>9}{'error':>8}")
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for (name, job), planned in zip(
            measured.items(), pool.map(plan, measured.values()), strict=True
        ):
            job |= planned
            path.write_text(json.dumps(found, indent=1) + "\n")
            if "plan_error" in job:
                print(f"{name:<52}{job['plan_error'].strip().splitlines()[-1:]}")
                continue
            errors.append(job["seconds"] / job["planned_seconds"] - 1)
            bytes_off.append(job["planned_peak"] / job["peak"] - 1)
            print(
                f"{name:<52}{job['seconds']:>9.4f}{job['planned_seconds']:>9.4f}{errors[-1]:>8.1%}"
                f"{job['peak'] / 1e9:>9.2f}{job['planned_peak'] / 1e9:>9.2f}{bytes_off[-1]:>8.2%}",
                flush=True,
            )
    if errors:
        print(f"tokens/s: MAPE {mean(map(abs, errors)):.1%}, bias {mean(errors):+.1%}; ", end="")
        print(f"bytes: mean absolute {mean(map(abs, bytes_off)):.2%}")
        draw(measured, path.with_suffix(".png"))


def draw(jobs: dict[str, Any], path: Path) -> None:
    """Measured over planned seconds and bytes of every job, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, job in jobs.items() if "planned_seconds" in job]
    panels = {"seconds": "seconds of a step", "peak": "most bytes allocated"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 1.5 + 0.3 * len(names)), sharey=True)
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        axis.barh(names, [jobs[name][key] / jobs[name][f"planned_{key}"] for name in names])
        axis.axvline(1, color="black", linewidth=1)
        axis.set_title(f"{title}, measured over planned", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read the command line."""
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--cluster", default="h200", help="of compare (default: h200)")
    parser.add_argument("--jobs", nargs="+", default=[], help="parts of names (default: all)")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.file, options.jobs)
    else:
        compare(options.file, options.cluster)


if __name__ == "__main__":
    main()
