"""How many matrices A an adapter of a linear layer has, from flags alone.

An adapter of a linear layer with several parts (query, key and value; gate and up) has one A for
all of them or one for each part, as its targets say (:mod:`mindspeed.lora.names`).
"""

from __future__ import annotations

import argparse

from mindspeed.lora.config import WHOLE
from mindspeed.lora.names import targeted

EXPERT = "mlp.experts.local_experts.0"
_WHOLE = (WHOLE,)


def parts_kept(args: argparse.Namespace, name: str) -> int:
    """Number of A matrices in the adapter of a linear layer; 0 without one."""
    parts = _parts(args, name)
    path = f"decoder.layers.0.{name if '.' in name else f'self_attention.{name}'}"
    return len(targeted(path, dict.fromkeys(parts, 0), args.lora_target_modules))


def _parts(args: argparse.Namespace, name: str) -> tuple[str, ...]:
    """Parts of the output of a linear layer."""
    if name == "linear_qkv":
        return ("q", "k", "v")
    gated = args.swiglu or args.quick_geglu
    return ("gate", "up") if gated and name.endswith("linear_fc1") else _WHOLE
