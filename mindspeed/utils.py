"""The original's import path of :mod:`mindspeed.adaptor.current_batch`."""

from mindspeed.adaptor.current_batch import (
    generate_actual_seq_len,
    get_actual_seq_len,
    get_position_ids,
    set_actual_seq_len,
    set_position_ids,
)
from mindspeed.session.batches import get_batch_on_this_cp_rank

__all__ = [
    "generate_actual_seq_len",
    "get_actual_seq_len",
    "get_batch_on_this_cp_rank",
    "get_position_ids",
    "set_actual_seq_len",
    "set_position_ids",
]
