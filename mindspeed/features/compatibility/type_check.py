"""A training that is started with ``--types`` checks the sums of its gradients first.

    mindspeed pretrain FLAGS --types
    torchrun pretrain_gpt.py FLAGS --types

Rank 0, or the launcher of ``mindspeed pretrain --nproc N``, starts ``mindspeed check --types`` with
the same command line in a process of its own, which needs no device. The other ranks wait for it
where all ranks of a job wait for each other. What is accepted trains; what is refused or cannot be
checked ends with the message and the status of the check.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspeed.features.compatibility.own_process import (
    outside_of_job,
    run_with_signals,
    without_options,
    words_of_job,
)
from mindspeed.features.feature import Feature, Megatron
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_CHECKED = "MINDSPEED_TYPES_CHECKED"
"""Set in the process that checks, and in ranks whose launcher has checked."""

_OF_FINETUNE = (
    ("finetune", "--finetune"),
    ("is_instruction_dataset", "--is-instruction-dataset"),
)
"""Flags that ``mindspeed finetune`` sets by itself."""


class TypeCheck(Feature, level=0, page="types.md", planning=("no part",)):
    """Before it trains, a job checks that every gradient is summed over the right ranks."""

    types: bool = flag(
        False, "before training, check that every gradient is summed over the right ranks"
    )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        self.check(megatron)

    def check(self, megatron: Mapping[str, Any]) -> None:
        """Check the job on rank 0, once.

        Raises:
            SystemExit: the job is refused, or cannot be checked; has the status of the check.
        """
        if os.environ.get(_CHECKED) or int(os.environ.get("RANK", "0")) > 0:
            return
        ranks = str(megatron.get("world_size") or 1)
        job = without_options(words_of_job(megatron), type(self))
        if not job[:1] or job[0].startswith("-"):  # not a script
            job += [one for name, one in _OF_FINETUNE if megatron.get(name) and one not in job]
            objective = megatron.get("objective", "next_token")
            if objective != "next_token" and "--objective" not in job:  # mindspeed dpo, reward
                job += ["--objective", objective]
        words = [sys.executable, "-m", "mindspeed", "check", "--types", "--devices", ranks]
        status, _ = run_with_signals([*words, "--", *job], {**outside_of_job(), _CHECKED: "1"})
        if status:
            raise SystemExit(status)
        os.environ[_CHECKED] = "1"
