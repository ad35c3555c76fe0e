"""Jobs for the ranks of the tests of ZeRO 2 and 3, other than training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def refusals(forms: Sequence[tuple[str | None, str]]) -> list[str]:
    """The message for each form of a checkpoint's optimizer and of ours; empty if it is read."""
    from mindspeed.checkpoint.load import _check_optimizer
    from mindspeed.errors import CheckpointError

    messages = []
    for kind, ours in forms:
        args = argparse.Namespace(
            use_distributed_optimizer=ours != "whole",
            use_megatron_fsdp=ours == "shares",
            bf16=True,  # an fp32 optimizer that is not distributed reads "fully_reshardable"
        )
        try:
            metadata = {"distrib_optim_sharding_type": kind}
            _check_optimizer(args, args, metadata, True, Path("saved"))
        except CheckpointError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def rule_refusals(pairs: Sequence[tuple[dict[str, str], dict[str, str]]]) -> list[str]:
    """The message for update rules of a checkpoint's run and of ours; empty if it is read."""
    from mindspeed.checkpoint.load import _check_optimizer
    from mindspeed.errors import CheckpointError

    messages = []
    for saved, ours in pairs:
        try:
            args = argparse.Namespace(use_distributed_optimizer=False, **ours)
            _check_optimizer(args, argparse.Namespace(**saved), {}, True, Path("saved"))
        except CheckpointError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages
