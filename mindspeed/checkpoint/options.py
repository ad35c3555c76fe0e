"""Flags of saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed.flags import flag
from mindspeed.ranges import COUNT, POSITIVE


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoint options: saving and loading."""

    save: str | None = flag(None, "directory to save to")
    save_interval: int | None = flag(
        None,
        "iterations between saves (default: only at the end)",
        aliases=("--persistent-save-interval",),
        range=POSITIVE,
    )
    load: str | None = flag(None, "directory to load from; without a checkpoint start fresh")
    auto_resume: bool = flag(False, "load from --save")
    exit_on_missing_checkpoint: bool = flag(False, "--load without a checkpoint is an error")
    keep_last: int | None = flag(None, "delete all but the newest N checkpoints", range=POSITIVE)
    save_retain_interval: int | None = flag(
        None, "with --keep-last: never delete iterations divisible by this", range=POSITIVE
    )
    async_save: bool = flag(False, "write in the background while training continues")
    ckpt_format: Literal["torch_dist"] = flag("torch_dist", "file format")
    ckpt_step: int | None = flag(None, "iteration to load (default: the latest)", range=COUNT)
    finetune: bool = flag(False, "load the weights only and start at iteration 0")
    use_checkpoint_args: bool = flag(False, "take the model's shape from the checkpoint")
    no_save_optim: bool = flag(False, "leave the optimizer out")
    no_save_rng: bool = flag(False, "leave the random number generators out")
    no_load_optim: bool = flag(False, "do not load the optimizer")
    no_load_rng: bool = flag(False, "do not load the random number generators")
    ckpt_fully_parallel_save: bool = flag(True, "data-parallel ranks share the writing")
    dist_ckpt_optim_fully_reshardable: bool = flag(
        True, "distributed optimizer state that any TP, PP and DP can load"
    )
    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected", "what happens with keys that do not match"
    )
