"""The original's ``get_batch_on_this_cp_rank``, for scripts that shard their batches themselves."""

from __future__ import annotations

from typing import Any

from mindspeed.adaptor.current_batch import get_actual_seq_len, shard_current_batch
from mindspeed.adaptor.versions.batch_functions import zigzag_chunks
from mindspeed.errors import ConfigError
from mindspeed.session.session import install


def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This context-parallel rank's part of a micro-batch. No communication.

    Args:
        batch: ``[b, s]`` tensors by name, None for tensors this pipeline stage does not need.
            ``position_ids`` are kept; where they are None, positions restart at each document.

    Returns:
        ``[b, tokens of this rank]`` tensors, and no attention mask where documents are known
        (``--reset-attention-mask`` or an adaptive ``--context-parallel-algo``).

    Raises:
        ConfigError: Documents do not fit the batch, or the model would not look at them.
    """
    if install().seams.documents.functions:
        return shard_current_batch(batch)
    if get_actual_seq_len() is not None:
        raise ConfigError("set_actual_seq_len needs --reset-attention-mask")
    return zigzag_chunks(batch)
