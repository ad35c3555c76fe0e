"""``--use-cpu-initialization`` starts from other weights at another tensor-parallel size on a CPU.

Megatron draws one master weight from the host's generator on every rank and cuts it. Before the
model exists, Megatron-LM warms up its fused functions with random tensors of the device, sized by
the tensor-parallel rank's share. Where the device is the host, both draw from one generator, so
the master weights depend on that size. The warm-up leaves the host's generator as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:jit-warmup"


def keep_generator(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``_warmup_jit_function``."""

    def _warmup_jit_function() -> None:
        with torch.random.fork_rng(devices=[]):
            original()

    return _warmup_jit_function


PATCHES = (
    Patch(
        "megatron.training.initialize:_warmup_jit_function",
        keep_generator,
        OWNER,
        "master weights on the host do not depend on the tensor-parallel size",
        expects="()",
    ),
)
