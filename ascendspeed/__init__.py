"""The library's oldest name; everything lives in :mod:`mindspeed`.

    from ascendspeed import get_args, get_tokenizer, initialize_megatron
    from ascendspeed.model import GPTModel

Names are looked up when they are used, so that ``import ascendspeed`` alone loads nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "get_args": "mindspeed.training.initialize",
    "get_tokenizer": "mindspeed.training.initialize",
    "initialize_megatron": "mindspeed.training.initialize",
    "print_rank_0": "mindspeed.adaptor.printing",
    "print_rank_last": "mindspeed.adaptor.printing",
    "get_num_microbatches": "megatron.core.num_microbatches_calculator",
    "get_current_global_batch_size": "megatron.core.num_microbatches_calculator",
    "update_num_microbatches": "megatron.core.num_microbatches_calculator",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("mindspeed.megatron_adaptor")  # before anything of Megatron
    return getattr(import_module(_HOMES[name]), name)
