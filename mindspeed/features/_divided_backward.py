"""What the features share whose schedules divide backward into I and W."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from mindspeed import device
from mindspeed.features.feature import Megatron, Problem

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


def divided_backward_problems(name: str, megatron: Megatron) -> Iterator[Problem]:
    """Layers whose weight gradients could not be computed apart.

    Args:
        name: the flag that asks for it.
        megatron: Megatron's arguments.
    """
    from mindspeed import te

    if te.choose(device.current().name)[0] == "native":
        yield Problem(
            name,
            "computes weight gradients apart from backward, which the layers of NVIDIA's "
            "Transformer Engine do not do",
            "unset MINDSPEED_TE",
        )
    if megatron.get("use_transformer_engine_op_fuser"):
        yield Problem(
            name,
            "cannot be combined with --use-transformer-engine-op-fuser: its fused layers compute "
            "weight gradients in backward",
            "remove one",
        )


def divide_backward(seams: Seams, owner: str) -> None:
    """Let the layers of models that are built from now on compute weight gradients apart."""
    from mindspeed.te.split_backward import new_store, split

    seams.chunk.add(partial(split, new_store()), owner=owner)
