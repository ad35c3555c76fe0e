"""The original's name of :mod:`mindspeed.core.context_parallel.get_batch_utils`."""

from __future__ import annotations

from mindspeed.core.context_parallel.get_batch_utils import (
    generate_actual_seq_len,
    get_actual_seq_len,
    get_batch_on_this_cp_rank,
    get_position_ids,
    set_actual_seq_len,
    set_position_ids,
)

__all__ = [
    "generate_actual_seq_len",
    "get_actual_seq_len",
    "get_batch_on_this_cp_rank",
    "get_position_ids",
    "set_actual_seq_len",
    "set_position_ids",
]
