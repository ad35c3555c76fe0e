"""``mindspeed pretrain``: train a GPT-style model on Megatron Core.

Started by torchrun (or Slurm, or Kubernetes) it is one rank of the job. Started by hand it checks
the flags, then starts the ranks of this machine itself: ``--nproc``, or as many as the parallel
sizes need.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

HELP = "pretrain a model"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed pretrain --help``."""
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.files import tighten_umask, warn_if_root
    from mindspeed.training.guard import stop_together
    from mindspeed.training.launch import inside_a_job, run_ranks

    tighten_umask()
    warn_if_root()
    if inside_a_job():
        with stop_together("pretrain"):
            return _train(_parse(argv), int(os.environ["WORLD_SIZE"]))
    args = _parse(argv)
    ranks = args.nproc or _ranks_needed(args)
    if args.dry_run or ranks == 1:
        return _train(args, ranks)
    _check(args, ranks)
    return run_ranks([sys.executable, "-m", "mindspeed", "pretrain", *argv], ranks)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import parse_with_recipe

    parser = build_parser(with_help=bool({"-h", "--help"} & set(argv)))
    return parse_with_recipe(argv, parser)


def _ranks_needed(args: argparse.Namespace) -> int:
    from mindspeed.training.resolve import model_parallel_size

    return model_parallel_size(args)


def _check(args: argparse.Namespace, ranks: int) -> None:
    """Find what is wrong before any rank starts, so that it is said once."""
    from mindspeed.adaptor import session
    from mindspeed.training.data import check_files, load_tokenizer
    from mindspeed.training.resolve import resolve

    settings = resolve(args, ranks)
    session.install().configure(vars(settings.args))
    check_files(settings.args)
    load_tokenizer(settings.args)


def _train(args: argparse.Namespace, ranks: int) -> int:
    from mindspeed.adaptor import session
    from mindspeed.training.data import check_files
    from mindspeed.training.pretrain import pretrain
    from mindspeed.training.resolve import resolve

    settings = resolve(args, ranks)
    session.install().configure(vars(settings.args))
    check_files(settings.args)
    pretrain(settings)
    return 0
