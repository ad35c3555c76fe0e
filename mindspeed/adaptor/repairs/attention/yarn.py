"""Defects of YaRN.

Defect: YaRN rotates all channels of a head, whatever share the flags give.

Where: ``YarnRotaryEmbedding.__init__`` of
``megatron.core.models.common.embeddings.yarn_rotary_pos_embedding`` counts its frequencies from
``kv_channels`` and passes ``rotary_percent`` on to its base class, whose frequencies it does not
use (Megatron-LM PR 7476).
Symptom: silent; ``--position-embedding-type yarn --rotary-percent 0.5`` trains as without the
second flag, and weights of a model with a part of rotated channels compute something else.
Fix: the channels that are rotated are its head.

Defect: YaRN rotary embeddings require an accelerator.

Where: ``YarnRotaryEmbedding.__init__`` enters ``torch.device(torch.cuda.current_device())``; torch
resolves such an index through its accelerator registry, which has no CPU.
Symptom: a RuntimeError when the model is built on a CPU.
Fix: set ``use_cpu_initialization``, with which it names the device; the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed import device
from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind


def rotate_a_part(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``YarnRotaryEmbedding.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = bind(original, (self, *args), kwargs)
        share = given.get("rotary_percent", 1.0)
        given |= {"kv_channels": int(given["kv_channels"] * share), "rotary_percent": 1.0}
        if device.current().on_host:
            given["use_cpu_initialization"] = True
        original(**given)

    return __init__


PATCHES = (
    repair(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
        rotate_a_part,
        "YaRN rotates the share of channels that --rotary-percent gives, on any device",
        expects="(self, kv_channels, rotary_percent, ...)",
    ),
)
