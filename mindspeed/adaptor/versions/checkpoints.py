"""Megatron's checkpoint writer: since 0.17 the common state is written by a function, and a save in
the background is NVIDIA's resiliency package's unless Megatron's own is chosen. Since 0.19 the
common state is an object among the tensors."""

from __future__ import annotations

from typing import Any

from mindspeed.adaptor.versions import at_least


def common_state_writers() -> tuple[tuple[Any, str], ...]:
    """Who holds the function that rank 0 alone writes the common state with, and its name there."""
    if at_least("0.19"):
        return ()
    if at_least("0.17"):
        from megatron.core.dist_checkpointing import serialization

        return ((serialization, "save_common"),)
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    return ((TorchCommonSaveStrategy, "save_common"),)


def save_options() -> dict[str, str]:
    """Arguments of ``dist_checkpointing.save`` that let Megatron's own writer plan the save."""
    return {"async_strategy": "mcore"} if at_least("0.17") else {}
