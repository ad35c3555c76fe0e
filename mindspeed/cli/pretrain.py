"""``mindspeed pretrain``: train a GPT-style model on Megatron Core.

Started by torchrun (or Slurm, or Kubernetes) it is one rank of the job. Started by hand it checks
the flags, then starts the ranks of this machine itself: ``--nproc``, or as many as the parallel
sizes need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed.training.resolve import Settings

HELP = "pretrain a model"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed pretrain --help``."""
    from mindspeed.training.quiet import choose_warnings

    choose_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.guard import stop_together
    from mindspeed.training.launch import inside_a_job, run_ranks

    if inside_a_job():
        with stop_together("pretrain"):
            return _train(_prepare(argv, ranks=int(os.environ["WORLD_SIZE"])))
    settings = _prepare(argv)
    args = settings.args
    if args.dry_run:
        from mindspeed.training.estimate import describe

        print(describe(settings))
        return 0
    if args.world_size == 1:
        return _train(settings)
    command = [sys.executable, "-m", "mindspeed", "pretrain", *argv]
    return run_ranks(command, args.world_size)


def _prepare(argv: Sequence[str], ranks: int | None = None) -> Settings:
    from mindspeed.training.initialize import prepare

    return prepare(argv, ranks)


def _train(settings: Settings) -> int:
    from mindspeed.training.pretrain import pretrain

    pretrain(settings)
    return 0
