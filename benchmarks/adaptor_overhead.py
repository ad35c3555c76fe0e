"""What the adaptor costs when no feature is on: import time, and time of a training step.

    python benchmarks/adaptor_overhead.py [--repeats 7] [--json out.json]

Both are measured against Megatron without the adaptor, on this machine's CPU, in alternating fresh
processes. Without the adaptor Megatron can't train on a CPU, but the forward and backward pass of a
GPTModel of the local spec runs when it is initialised on the host, compiles nothing, and two
names are replaced by hand (``torch.cuda.current_device`` and the random-state fork, which does
nothing there and its real work with the adaptor). That step is the yardstick.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

IMPORT = """
import time, torch
start = time.perf_counter()
{adaptor}
import megatron.core
import megatron.core.models.gpt
print(time.perf_counter() - start)
"""

STEP = """
import time, torch
{adaptor}
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
{seed}
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=4, hidden_size=128, num_attention_heads=4, use_cpu_initialization=True,
    hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
    bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=2048, max_sequence_length=128)
tokens = torch.randint(0, 2048, (4, 128))
positions = torch.arange(128).expand(4, -1)
mask = torch.ones(128, 128, dtype=torch.bool).triu(1)[None, None]
times = []
for _ in range({steps}):
    start = time.perf_counter()
    model(tokens, positions, mask, labels=tokens).mean().backward()
    model.zero_grad()
    times.append(time.perf_counter() - start)
print(sorted(times)[len(times) // 4])
"""
BY_HAND = """
import contextlib
torch.compiler.set_stance("force_eager")
torch.cuda.current_device = lambda: torch.device("cpu")
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
"""
ADAPTOR = "import mindspeed.megatron_adaptor"
SEED = """
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
model_parallel_cuda_manual_seed(0)
"""


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="fresh processes of each kind")
    parser.add_argument("--steps", type=int, default=60, help="training steps in each process")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    import_bare, import_with = alternate(IMPORT, "", args.repeats)
    step_bare, step_with = alternate(STEP, BY_HAND, args.repeats, steps=args.steps)
    figures = {
        "import_seconds_megatron": import_bare,
        "import_seconds_with_adaptor": import_with,
        "import_seconds_added": import_with - import_bare,
        "step_seconds_megatron": step_bare,
        "step_seconds_with_adaptor": step_with,
        "step_overhead_percent": 100 * (step_with / step_bare - 1),
    }
    for name, value in figures.items():
        print(f"{name:32} {value:.4f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=2)


def alternate(program: str, without: str, repeats: int, **values: int) -> tuple[float, float]:
    """The median of what the program prints, without and with the adaptor, in turn."""
    bare, adapted = [], []
    for _ in range(repeats):
        bare.append(run(program.format(adaptor=without, seed="", **values)))
        adapted.append(run(program.format(adaptor=ADAPTOR, seed=SEED, **values)))
    return statistics.median(bare), statistics.median(adapted)


def run(program: str) -> float:
    """The number that a fresh process prints last."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
