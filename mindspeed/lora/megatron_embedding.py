"""An adapter of the embedding, whose rows are sharded like the embedding's.

    y = W[t] + s B[t] A        W [v, h] frozen, A [r, h], B [v, r], B = 0 at first

PEFT's ``lora_embedding_A`` is our B, transposed, and its ``lora_embedding_B`` our A: the matrices
are those of the output layer's adapter, which a tied model may share. As there, merging adds
``s B A`` to the weight.

A rank has the rows of its own tokens, and both terms are summed over the ranks in the collective
that the frozen embedding has. So A has a part of its gradient on each, as in a column layer. There
is no dropout, as in PEFT: tokens cannot be scaled.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed.lora.config import LoraConfig
from mindspeed.lora.linear import (
    AdaptedLinear,
    AdapterOptions,
    TPShard,
    adapted_class,
    new_matrices,
)


class AdaptedEmbedding(AdaptedLinear):
    """Mixin of Megatron's ``VocabParallelEmbedding`` with an adapter."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the weight and of its correction.

        Args:
            tokens: int64 ``[b, s]``.

        Returns:
            ``[b, s, h]``; ``[s / ranks, b, h]`` where the embedding scatters its result.
        """
        if self.switched_off:
            return super().forward(tokens)  # type: ignore[misc,no-any-return]
        from megatron.core.tensor_parallel import (
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        weight, group = self.weight, self._lora.shard.group  # type: ignore[attr-defined]
        a, b = self.adapter(weight.dtype)
        own = tokens - self.vocab_start_index  # type: ignore[attr-defined]
        with torch.no_grad():
            elsewhere = (own < 0) | (own >= b.shape[0])
        own = own.masked_fill(elsewhere, 0)
        # The backward of the function adds in any order.
        rows_of = operator.getitem if self.deterministic_mode else _look_up  # type: ignore[attr-defined]
        out = rows_of(weight, own) + (rows_of(b, own) @ a) * self._lora.scale
        out = out.masked_fill(elsewhere[..., None], 0.0)
        if self._lora.shard.sequence_parallel:
            rows = out.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(rows, group=group)  # type: ignore[no-any-return]
        return reduce_from_tensor_model_parallel_region(out, group=group)  # type: ignore[no-any-return]


def _look_up(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, weight)


def embedding_shard_of(module: Any) -> TPShard:
    """How an embedding is sharded."""
    return TPShard("column", module.tp_group, module.reduce_scatter_embeddings)


def give_embedding_adapter(module: Any, options: AdapterOptions) -> None:
    """Turn an embedding into one with an adapter; A and B are empty."""
    module._lora = options
    module.lora_A, module.lora_B = new_matrices(module.weight, options)
    module.__class__ = adapted_class(type(module), AdaptedEmbedding)  # type: ignore[arg-type]


def share_adapter(layer: Any, config: LoraConfig, shard: TPShard, embedding: Any) -> None:
    """Give the output layer of a tied model the adapter of its embedding.

    Args:
        layer: The output layer.
        config: Rank and scale.
        shard: How the layer is sharded.
        embedding: Has its adapter.
    """
    from mindspeed.te import local_linears

    own = embedding._lora
    layer._lora = own._replace(
        shard=shard, original=type(layer), tied=embedding.weight, shared=True
    )
    layer.lora_A, layer.lora_B = embedding.lora_A, embedding.lora_B
    local_linears.convert(layer)
    layer.__class__ = adapted_class(type(layer), AdaptedLinear)  # type: ignore[arg-type]
