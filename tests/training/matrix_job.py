"""One rank of the layout matrix: our trainer with Megatron's default flags."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 8 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0 --seq-length 64
""")
TRAINING = shlex.split("""
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1000 --log-interval 1 --eval-iters 0
""")


def train(flags: Sequence[str]) -> None:
    """Train on this rank; later flags win."""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.pretrain import pretrain

    pretrain(_prepare([*MODEL, *TRAINING, *flags], int(os.environ["WORLD_SIZE"])))


def modes_of_passes(flags: Sequence[str]) -> list[tuple[bool, bool]]:
    """Train; for every forward pass: is the model in training mode, are gradients recorded?"""
    import torch

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.forward_step import forward_step
    from mindspeed.training.pretrain import pretrain

    modes = []

    def watched(data_iterator, model):
        modes.append((model.training, torch.is_grad_enabled()))
        return forward_step(data_iterator, model)

    settings = _prepare([*MODEL, *TRAINING, *flags], int(os.environ["WORLD_SIZE"]))
    pretrain(settings, forward_step=watched)
    return modes


def dry_run(flags: Sequence[str]) -> tuple[str, int]:
    """What a dry run on two ranks says: the schedule, and parameters on the first rank."""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.parameter_counts import count
    from mindspeed.training.pipeline_figures import figures

    args = _prepare([*MODEL, *TRAINING, "--dry-run", *flags], 2).args
    return figures(args).name, count(args)[0].entries()


def figures_text(flags: Sequence[str]) -> str:
    """Figures that a dry run of a tiny job on two ranks prints."""
    from mindspeed.cli.dry_run import figures
    from mindspeed.training.initialize import prepare
    from tests.support.trainer_job import command

    return figures(prepare(command(["--dry-run", *flags]), 2).args)


def refusal_of_bytes(flags: Sequence[str]) -> str:
    """Why a dry run of a tiny job counts no bytes where it takes any layer to be one too many."""
    from mindspeed.cli import dry_run
    from mindspeed.errors import PlanError
    from mindspeed.training.initialize import prepare
    from tests.support.trainer_job import command

    dry_run.MANY_LAYER_RUNS = 0
    words = command(["--dry-run", *flags])
    try:
        dry_run.counted(prepare(words, 2).args, words, {})
    except PlanError as error:
        return str(error)
    return "counted"
