"""``ascendspeed.global_vars``: what the process was started with."""

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.training.initialize import get_args, get_tokenizer

__all__ = ["get_args", "get_tokenizer"]
