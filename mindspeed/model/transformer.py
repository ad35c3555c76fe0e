"""The attention mask that the process shares; see :mod:`mindspeed.attention.shared_mask`."""

from __future__ import annotations

from mindspeed.attention.shared_mask import get_attention_mask, set_attention_mask
from mindspeed.ops.visibility import generate_attention_mask

__all__ = ["generate_attention_mask", "get_attention_mask", "set_attention_mask"]
