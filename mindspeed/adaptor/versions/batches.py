"""A micro-batch in zigzag chunks: since 0.18 Megatron's function needs the group, and is told about
hybrid context parallelism, which this library does not use."""

from __future__ import annotations

from typing import Any

from mindspeed.adaptor.versions import at_least


def zigzag_chunks(batch: dict[str, Any]) -> dict[str, Any]:
    """The context-parallel rank's two chunks of tensors ``[b, s]`` and masks ``[b, 1, s, s]``."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    options: dict[str, Any] = {}
    if at_least("0.18"):
        options = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    return get_batch_on_this_cp_rank(batch, **options)  # type: ignore[no-any-return]
