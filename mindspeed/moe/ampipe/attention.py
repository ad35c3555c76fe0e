"""Self attention of one layer in chunks of query rows; keys and values of the whole sequence.

Megatron's own code makes queries, keys and values, with norms and rotary positions: its forward
runs until it calls the core attention. The core attention then runs block by block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed.moe.ampipe.rows import ContextRows, Prefixes, alone, blocks
from mindspeed.moe.first_call import arguments_of_first_call


class ChunkedAttention:
    """One call of a layer's self attention.

    Args:
        attention: Megatron's ``SelfAttention``.
        bottom_right: Type of a causal mask whose last row belongs to the last key.
        chunks: D.
        ranks: tensor-parallel ranks that share the rows of the result.
        checkpoint: Recomputes a call in backward, if the layer's core attention is recomputed.
        context: Context-parallel ranks that share the sequence; None: it is whole.

    Raises:
        ValueError: the rows cannot be shared evenly, or the mask is not causal.
    """

    def __init__(
        self,
        attention: Any,
        run: Callable[[], Any],
        bottom_right: Any,
        *,
        chunks: int,
        ranks: int,
        checkpoint: Callable[..., torch.Tensor] | None,
        context: ContextRows | None = None,
    ) -> None:
        self._attention, self._bottom_right, self._checkpoint = attention, bottom_right, checkpoint
        query, key, value, self._mask, self._options = _inputs_of_core(attention, run)
        if self._options["attn_mask_type"].name != "causal":
            raise ValueError(
                f"--ampipe-degree needs a causal mask, not {self._options['attn_mask_type'].name}"
            )
        self._blocks = blocks(query.shape[0], chunks, ranks)
        self._rows, self._context = query.shape[0], context
        if context is not None:
            if chunks * ranks % 2:
                raise ValueError(f"--ampipe-degree {chunks} is odd, with --context-parallel-size")
            key, value = context.gathered(key, value)
            self._mask = None  # causal, by the mask's type
        size = self._blocks[0][0][1]
        self._queries = query.split(size)  # one split: gradients are concatenated, not added
        self._keys, self._values = Prefixes(key), Prefixes(value)

    def chunk(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the projection for a chunk, its rows of this rank ``[n, b, h]``, and a bias."""
        rows = [self._attend(start, end) for start, end in self._blocks[index]]
        return self._attention.linear_proj(torch.cat(rows))  # type: ignore[no-any-return]

    def _attend(self, start: int, end: int) -> torch.Tensor:
        mask = self._mask
        if mask is not None and mask.dim() > 2 and mask.shape[-2] > 1:
            mask = mask[..., start:end, :end]
        query = self._queries[start // (end - start)]
        seen = end if self._context is None else self._context.end(end, self._rows)
        inputs = (query, self._keys.first(seen), self._values.first(seen), mask)
        if self._checkpoint is None:
            return self._core(*inputs)
        return self._checkpoint(self._core, False, *inputs)

    def _core(self, *inputs: Any) -> torch.Tensor:
        options = self._options
        if inputs[0].shape[0] != inputs[1].shape[0]:
            options = {**options, "attn_mask_type": self._bottom_right}
        core = self._attention.core_attention
        with contextlib.nullcontext() if self._context is None else alone(core):
            return core(*inputs, **options)  # type: ignore[no-any-return]


def _inputs_of_core(attention: Any, run: Callable[[], Any]) -> tuple[Any, ...]:
    """Query, key, value, mask and the other arguments of the core attention."""
    recomputed, attention.checkpoint_core_attention = attention.checkpoint_core_attention, False
    try:
        inputs, options = arguments_of_first_call(attention.core_attention, run)
    finally:
        attention.checkpoint_core_attention = recomputed
    return (*inputs, options)
