"""Defect: YaRN rotary embeddings require an accelerator.

Where: ``YarnRotaryEmbedding.__init__`` enters ``torch.device(torch.cuda.current_device())``; torch
resolves such an index through its accelerator registry, which has no CPU.
Symptom: a RuntimeError when the model is built on a CPU.
Fix: set ``use_cpu_initialization``, with which it names the device; the values are the same.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind
from mindspeed.device import Device

OWNER = "repair:yarn"


def needed_on(device: Device, te: str) -> bool:
    """Whether the host computes."""
    return device.on_host


def initialize_on_host(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``YarnRotaryEmbedding.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = bind(original, (self, *args), kwargs)
        original(**(given | {"use_cpu_initialization": True}))

    return __init__


PATCHES = (
    Patch(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
        initialize_on_host,
        OWNER,
        "the device is given by name: torch resolves an index to an accelerator only",
        expects="(self, kv_channels, rotary_percent, ...)",
    ),
)
