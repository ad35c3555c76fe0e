"""The original's import path of :mod:`mindspeed.adaptor.context_parallel.ring`."""

from mindspeed.adaptor.context_parallel.ring import ringattn_context_parallel

__all__ = ["ringattn_context_parallel"]
