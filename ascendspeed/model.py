"""``ascendspeed.model``: a GPT that loads any checkpoint and generates."""

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.inference.gpt_model import GPTModel

__all__ = ["GPTModel"]
