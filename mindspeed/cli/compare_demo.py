"""``mindspeed compare --demo``: plant a fault in a small job, and find it.

Three kinds of runs from one checkpoint: A on one rank; A three more times with noise as large as
rounding; B on two tensor-parallel ranks, one of which scales the queries of one layer by 1.02.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mindspeed.errors import MindSpeedError

LAYER = 2
FACTOR = 1.02
_JOB = shlex.split(
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1000 --transformer-impl local"
)


def demo() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """Record A and B.

    Returns:
        The directory with ``a`` and ``b``, which goes with the second value.
    """
    holder = tempfile.TemporaryDirectory(prefix="mindspeed-compare-")
    folder = Path(holder.name)
    weights = folder / "weights"
    _run("the weights", "pretrain", [*_JOB, "--lr", "0", "--save", str(weights)])
    job = [*_JOB, "--load", str(weights), *["--finetune", "--no-load-optim", "--no-load-rng"]]
    _run("A, one rank", "pretrain", [*job, "--record", str(folder / "a")])
    for number in (1, 2, 3):
        path = str(folder / "a" / f"noise-{number}")
        noise = ["--record", path, "--record-noise", str(number)]
        _run(f"A with noise {number}", "pretrain", [*job, *noise])
    parallel = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    _run(
        f"B, two tensor-parallel ranks; rank 1 scales the queries of layer {LAYER} by {FACTOR}",
        "",
        [*job, *parallel, "--record", str(folder / "b")],
    )
    return folder, holder


def _run(title: str, command: str, flags: list[str]) -> None:
    print(f"recording {title}", flush=True)
    words = ["-m", "mindspeed", command, *flags]
    if not command:
        code = f"from {__name__} import launch; launch()"
        words = ["-c", code, *flags]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "MINDSPEED_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise MindSpeedError(f"recording {title} failed:\n{done.stdout[-2000:]}")


def launch() -> None:
    """Run two ranks of the job with the fault: the main program of B."""
    from mindspeed.training.launch import inside_a_job, run_ranks

    if inside_a_job():
        _rank(sys.argv[1:])
        return
    code = f"from {__name__} import launch; launch()"
    sys.exit(run_ranks([sys.executable, "-c", code, *sys.argv[1:]], 2))


def _rank(flags: list[str]) -> None:
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.fail_together import stop_together
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    def with_fault(*given: Any) -> Any:
        model = gpt_model(*given)
        if os.environ["RANK"] == "1":
            _plant(model)
        return model

    with stop_together("pretrain"):
        pretrain(prepare(flags, 2, parser=build_parser()), with_fault)


def _plant(model: Any) -> None:
    attention = model.decoder.layers[LAYER].self_attention.core_attention
    forward = attention.forward
    attention.forward = lambda query, *args, **kwargs: forward(query * FACTOR, *args, **kwargs)
