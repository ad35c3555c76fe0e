"""Step time of our trainer over Megatron-LM's own loop, same model, same adaptor, same machine.

    python benchmarks/trainer_vs_megatron.py --megatron /path/to/Megatron-LM [--json out.json]
    python benchmarks/trainer_vs_megatron.py --megatron DIR --accelerator --cluster h200

Both train the same small LLaMA on the same invented tokens with the same flags, in turns, so that a
busy machine slows both. The figure is the ratio of the medians of the time per iteration, after the
first intervals; at most 1.00 is the target. Losses are compared too: equal digits or no figure.

With ``--parts`` the figures are processor time of rank 0, minimum of all steps: of an iteration,
and of the schedule in it, which runs the same layers forward and backward in both. What a loop can
save is the rest, and what it does around them: reading batches, the loss.

With ``--accelerator`` the model has the size of LLaMA 3.2 1B in bf16, tokens/s and the share of the
cluster's bf16 peak are reported too, and losses may differ by a thousandth: sums of a device have
no fixed order.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mindspeed import device
from mindspeed.planner.cluster import load_cluster

MODEL = """
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style linear --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 --eval-interval 100000
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-dropout-fusion
""".split()  # noqa: SIM905
SMALL = ["--no-rope-fusion", "--no-bias-swiglu-fusion"]
# Later flags win. Fused operators are ours in both loops.
LARGE = """
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2
    --global-batch-size 8 --vocab-size 32000 --lr 1e-5 --bf16 --use-flash-attn --use-fused-rmsnorm
    --use-fused-swiglu --use-fused-rotary-pos-emb
""".split()  # noqa: SIM905
LAYOUTS = {
    "one rank": (1, []),
    "tensor 2": (2, ["--tensor-model-parallel-size", "2"]),
    "pipeline 2": (2, ["--pipeline-model-parallel-size", "2"]),
    "data 2, distributed optimizer": (2, ["--use-distributed-optimizer"]),
}
WARM_UP_INTERVALS = 2
WATCH = """
import atexit, os, time
import mindspeed.megatron_adaptor
import megatron.core.pipeline_parallel as pipeline
begins, seconds = [], []
chosen = pipeline.get_forward_backward_func
def watched(*args, **kwargs):
    schedule = chosen(*args, **kwargs)
    def run(*args, **kwargs):
        begins.append(time.process_time())
        result = schedule(*args, **kwargs)
        seconds.append(time.process_time() - begins[-1])
        return result
    return run
pipeline.get_forward_backward_func = watched
def tell():
    whole = min(last - first for first, last in zip(begins, begins[1:]))
    print(f"processor ms: {1000 * whole} {1000 * min(seconds)}", flush=True)
if os.environ.get("RANK", "0") == "0":
    atexit.register(tell)
"""
"""What a loop runs before it, for ``--parts``."""


def main() -> None:
    """Print one row per layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", required=True, type=Path, help="Megatron-LM core_v0.16.1")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--interval", type=int, default=5, help="iterations per log line")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--accelerator", action="store_true", help="1B parameters, on the device")
    parser.add_argument("--cluster", default="generic", help="preset whose bf16 peak is 100%%")
    parser.add_argument("--parts", action="store_true", help="the share of the schedule")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    here = device.current()
    layouts = [one for one in LAYOUTS if not options.accelerator or LAYOUTS[one][0] <= here.count()]
    model, allowed = (MODEL + LARGE, 1e-3) if options.accelerator else (MODEL + SMALL, 0.0)
    print(f"{'layout':<32}{'Megatron-LM ms':>16}{'mindspeed ms':>16}{'ratio':>8}")
    figures = []
    for name in options.layout or layouts:
        ranks, flags = LAYOUTS[name]
        flags = [
            *model,
            *flags,
            *("--train-iters", str(options.iterations), "--log-interval", str(options.interval)),
            *("--transformer-impl", options.transformer_impl),
        ]
        if options.parts:
            print_parts(name, options.megatron, ranks, flags)
            continue
        theirs: list[float] = []
        ours: list[float] = []
        for _ in range(options.rounds):
            their_times, their_loss = run_megatron(options.megatron, ranks, flags)
            our_times, our_loss, flops = run_ours(ranks, flags)
            if abs(float(their_loss) / float(our_loss) - 1) > allowed:
                sys.exit(f"{name}: last losses differ, {their_loss} and {our_loss}")
            theirs += their_times[WARM_UP_INTERVALS:]
            ours += our_times[WARM_UP_INTERVALS:]
        left, right = statistics.median(theirs), statistics.median(ours)
        print(f"{name:<32}{left:>16.1f}{right:>16.1f}{right / left:>8.3f}", flush=True)
        figures.append(
            {"layout": name, "megatron_lm_ms": left, "mindspeed_ms": right, "ratio": right / left}
        )
        if options.accelerator:
            peak = load_cluster(options.cluster).device.peak_tflops["bf16"] * 1e12
            figures[-1] |= {"megatron_lm": rates(left, model, flops, peak)}
            figures[-1] |= {"mindspeed": rates(right, model, flops, peak)}
            print(f"{'':<32}" + json.dumps(figures[-1]["mindspeed"]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


def print_parts(name: str, root: Path, ranks: int, flags: list[str]) -> None:
    """Processor milliseconds of an iteration, and of the schedule in it."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "ours.py"
        end = "import sys\nfrom mindspeed.cli.main import main\nsys.exit(main())\n"
        ours.write_text(f"{WATCH}\n{end}")
        outputs = {
            "Megatron-LM": megatron_output(root, ranks, flags, WATCH),
            "mindspeed": launch(ranks, [str(ours), "pretrain", *flags, "--eval-iters", "0"], {}),
        }
    for loop, output in outputs.items():
        ((whole, schedule),) = re.findall(r"processor ms: ([\d.]+) ([\d.]+)", output)
        share = f"{float(schedule):.1f} of {float(whole):.1f} ms in the schedule"
        print(f"{name:<32}{loop:<14}{share}", flush=True)


def rates(milliseconds: float, flags: list[str], flops: float, peak: float) -> dict[str, float]:
    """Tokens/s of all ranks; model FLOPs of a rank over its peak."""

    def last(name: str) -> int:
        return int(flags[len(flags) - flags[::-1].index(name)])

    tokens = last("--seq-length") * last("--global-batch-size")
    seconds = milliseconds / 1000
    return {"tokens_per_second": tokens / seconds, "mfu": flops / seconds / peak}


def run_megatron(root: Path, ranks: int, flags: list[str]) -> tuple[list[float], str]:
    """Milliseconds per iteration of each interval, and the last loss, of pretrain_gpt.py."""
    output = megatron_output(root, ranks, flags, "")
    times = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)
    losses = re.findall(r"lm loss: (\S+)", output)
    return [float(time) for time in times], losses[-1]


def megatron_output(root: Path, ranks: int, flags: list[str], before: str) -> str:
    """What pretrain_gpt.py prints, with the import and further lines at its beginning."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pretrain_gpt.py"
        text = (root / "pretrain_gpt.py").read_text()
        line = "import torch\n"
        added = f"{line}import mindspeed.megatron_adaptor\n{before}"
        script.write_text(text.replace(line, added, 1))
        path = os.pathsep.join([str(root), *sys.path])
        extra = ["--eval-iters", "0", "--distributed-backend", device.current().backend]
        return launch(ranks, [str(script), *flags, *extra], {"PYTHONPATH": path})


def run_ours(ranks: int, flags: list[str]) -> tuple[list[float], str, float]:
    """The same of ``mindspeed pretrain``, and the FLOPs of an iteration on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        arguments = ["-m", "mindspeed", "pretrain", *flags, "--metrics-file", str(file)]
        launch(ranks, arguments, {})
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    records = [line for line in lines if "lm_loss" in line]  # not validation and test
    times = [1000 * record["seconds_per_iteration"] for record in records]
    flops = records[-1]["tflops_per_device"] * 1e12 * records[-1]["seconds_per_iteration"]
    return times, f"{records[-1]['lm_loss']:.6E}", flops


def launch(ranks: int, arguments: list[str], environment: dict[str, str]) -> str:
    """Run ``arguments`` under torchrun and return what it printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), *arguments),
    ]
    fixed = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_GLOO_LAZY_INIT": "1",
    }
    result = subprocess.run(
        command,
        env={**os.environ, **fixed, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout[-4000:]}")
    return result.stdout


if __name__ == "__main__":
    main()
