"""The original's import path of :mod:`mindspeed.adaptor.context_parallel.adaptive`."""

from mindspeed.adaptor.context_parallel.adaptive import adaptive_attn_context_parallel

__all__ = ["adaptive_attn_context_parallel"]
