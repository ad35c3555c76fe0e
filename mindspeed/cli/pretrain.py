"""``mindspeed pretrain``: train a GPT-style model on Megatron Core.

Launched by torchrun (or Slurm, or Kubernetes) it is one rank of the job. Otherwise it checks the
flags, then launches the ranks on this machine: ``--nproc``, or as many as the parallel sizes need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed.training.resolve import Settings

HELP = "pretrain a model"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed pretrain --help``."""
    return train(argv, "pretrain", {})


def train(argv: Sequence[str], command: str, defaults: Mapping[str, Any]) -> int:
    """Train, as a rank of a job or as its launcher.

    Args:
        argv: Flags.
        command: The sub-command that was called.
        defaults: Values of flags that ``argv`` and its recipe do not set.
    """
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.fail_together import stop_together
    from mindspeed.training.launch import inside_a_job, run_ranks
    from mindspeed.training.resolve_parallel import check_fits_here

    if inside_a_job():
        with stop_together(command):
            settings = _prepare(argv, int(os.environ["WORLD_SIZE"]), command, defaults)
            if not settings.args.dry_run:
                return _train(settings)
        return _dry_run(settings, argv, defaults)  # forks: without the thread that watches ranks
    settings = _prepare(argv, None, command, defaults)
    if settings.args.dry_run:
        return _dry_run(settings, argv, defaults)
    if settings.args.world_size == 1:
        return _train(settings)
    check_fits_here(settings.args.world_size)
    ranks = [sys.executable, "-m", "mindspeed", command, *argv]
    return run_ranks(ranks, settings.args.world_size)


def _prepare(
    argv: Sequence[str],
    ranks: int | None = None,
    command: str = "pretrain",
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    from mindspeed.training import help_page
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.initialize import prepare

    parser = build_parser(with_help=help_page.is_asked(argv))
    parser.prog = f"mindspeed {command}"
    parser.set_defaults(**(defaults or {}))
    return prepare(argv, ranks, parser=parser)


def _dry_run(settings: Settings, argv: Sequence[str], defaults: Mapping[str, Any]) -> int:
    from mindspeed.cli.dry_run import print_dry_run

    if os.environ.get("RANK", "0") == "0":
        print_dry_run(settings, argv, defaults)
    return 0


def _train(settings: Settings) -> int:
    from mindspeed.training.pretrain import pretrain

    pretrain(settings)
    return 0
