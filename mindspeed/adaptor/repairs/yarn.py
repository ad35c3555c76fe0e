"""YaRN rotary embeddings ask torch for accelerator number 0.

``YarnRotaryEmbedding`` enters ``torch.device(torch.cuda.current_device())``. The current device is
a number, and only torch's accelerator registry, which knows no CPU, turns a number into a device.
With ``use_cpu_initialization`` it names the device instead; the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:yarn"


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
        "the CPU is a device by name, not by number",
        expects="(self, kv_channels, rotary_percent, ...)",
    ),
)
