"""Defect: on a CPU, ``--use-cpu-initialization`` depends on the tensor-parallel size.

Where: ``megatron.training.initialize._warmup_jit_function`` draws random tensors on the device,
sized by the rank's tensor-parallel shard, before the model is built. Every rank then draws the
same full weight from the host generator and takes its shard; where the device is the host, both
draw from the same generator.
Symptom: different initial weights, and so different losses, at another tensor-parallel size.
Fix: restore the state of the host generator after the warm-up.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:jit-warmup"


def preserve_cpu_rng(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``_warmup_jit_function``."""

    def _warmup_jit_function() -> None:
        with torch.random.fork_rng(devices=[]):
            original()

    return _warmup_jit_function


PATCHES = (
    Patch(
        "megatron.training.initialize:_warmup_jit_function",
        preserve_cpu_rng,
        OWNER,
        "initial weights drawn on the host do not depend on the tensor-parallel size",
        expects="()",
    ),
)
