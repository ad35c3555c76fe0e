"""Runs the trainer on the ranks of a :class:`mindspeed.testing.RankPool`, and says what it did."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SETUP = "tests.support.warm"

# A LLaMA with 0.3 million parameters on invented tokens.
TINY = shlex.split("""
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 8
    --num-query-groups=2 --swiglu --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3
    --lr-decay-style linear --train-iters 6 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 1000 --transformer-impl local --log-interval 1
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
""")


def train(
    flags: Sequence[str], before: Callable[..., None] | None = None, *args: Any
) -> dict[str, Any]:
    """Train on this rank.

    Args:
        flags: added to :data:`TINY`; later flags win.
        before: called with ``args`` first, to prepare faults.

    Returns:
        ``iteration`` (last done), ``digest`` of this rank's parameters, ``error``.
    """
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.errors import MindSpeedError
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    if before is not None:
        before(*args)
    modules = []

    def provider(*given: Any) -> Any:
        modules.append(gpt_model(*given))
        return modules[-1]

    try:
        settings = _prepare(command(flags), int(os.environ["WORLD_SIZE"]))
        iteration = pretrain(settings, provider)
    except MindSpeedError as error:
        return {"error": f"{type(error).__name__}: {error}", "digest": digest(modules)}
    return {"iteration": iteration, "digest": digest(modules), "error": None}


def whole_mock_data() -> None:
    """Take all documents of ``--mock-data``; :mod:`tests.support.warm` leaves most of them out."""
    if module := sys.modules.get("megatron.core.datasets.gpt_dataset"):
        module.MockGPTLowLevelDataset.size = 100_000


def command(flags: Sequence[str]) -> list[str]:
    """:data:`TINY` and additional flags; --train-samples takes the place of --train-iters."""
    if "--train-samples" not in flags:
        return [*TINY, *flags]
    at = TINY.index("--train-iters")
    return [*TINY[:at], *TINY[at + 2 :], *flags]


def digest(modules: Sequence[Any]) -> str:
    """Hash of all parameters, or of this rank's shares of them, bit for bit."""
    total = hashlib.sha256()
    for module in modules:
        for parameter in module.parameters():
            data = getattr(parameter, "_local_tensor", parameter).detach()
            total.update(data.float().contiguous().numpy().tobytes())
    return total.hexdigest()


def metrics(path: Path) -> list[dict[str, Any]]:
    """The training records of a run."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if "lm_loss" in record]


def runs(pool: Any, folder: Path, flags_for: Callable[..., list[str]]) -> Callable[..., list[dict]]:
    """Runs of the trainer that begin with the same weights.

    Args:
        pool: a :class:`mindspeed.testing.RankPool`.
        folder: for weights and metrics.
        flags_for: adds the flags of the data.

    Returns:
        ``run(world, *flags)`` trains two steps on so many ranks and returns the metrics.
    """

    def train_on(world: int, *flags: str) -> None:
        results = pool.run(world, train, flags_for(*flags), setup=SETUP, backend=None, timeout=240)
        assert {result["error"] for result in results} == {None}, results

    weights, file = folder / "weights", folder / "metrics.jsonl"
    train_on(1, f"--train-iters 1 --lr 0 --save {weights}")

    def run(world: int, *flags: str) -> list[dict]:
        file.unlink(missing_ok=True)
        load = f"--load {weights} --finetune --no-load-optim --no-load-rng --train-iters 2"
        train_on(world, load, f"--metrics-file {file}", *flags)
        return metrics(file)

    return run
