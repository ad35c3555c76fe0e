"""Final values of a training job for commands that inspect it: flags as of ``mindspeed pretrain``.

Figures of shapes do not depend on learning rate and duration, so these flags may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed.training.resolve import Settings


def settings_of(flags: Sequence[str], command: str, ranks: int | None = None) -> Settings:
    """The values of a dry run; features of this process are then those of the job.

    Args:
        flags: of the job.
        command: what the user typed, for messages.
        ranks: size of the job; default ``--nproc``, else what the flags need.

    Raises:
        MindSpeedError: a flag is wrong.
    """
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.initialize import prepare

    parser = build_parser(with_help=False)
    parser.prog = f"mindspeed {command}"
    parser.set_defaults(lr=1e-4)
    if not {"--train-samples", "--config"} & set(flags):
        parser.set_defaults(train_iters=1)
    return prepare(["--dry-run", *flags], ranks, parser=parser)
