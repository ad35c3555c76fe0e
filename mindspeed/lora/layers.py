"""The layers of a pipeline stage that can have adapters, and the parts that one consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed.lora.config import EMBEDDING, WHOLE, is_expert, named_modules
from mindspeed.lora.experts import expert_tp_shard_of
from mindspeed.lora.linear import TPShard, tp_shard_of
from mindspeed.lora.megatron_embedding import embedding_shard_of


def linear_layers(chunk: Any) -> Iterator[tuple[str, Any, TPShard]]:
    """Layers that can have adapters; grouped experts are one of them.

    The joint projection of a gated delta net has none: files have its parts in another order.
    """
    for name, module in named_modules(chunk):
        if name.endswith(".in_proj"):
            continue
        if name == EMBEDDING:
            shard: TPShard | None = embedding_shard_of(module)
        else:
            shard = expert_tp_shard_of(module) if is_expert(name) else tp_shard_of(module)
        if shard is not None:
            yield name, module, shard


def parts_of(name: str, module: Any, config: Any, shard: TPShard) -> dict[str, int]:
    """Parts of a layer, with this rank's rows of each; ``{"all": rows}`` if it has one part.

    Args:
        name: Its name in the whole model.
        module: The layer.
        config: Megatron's configuration of the model.
        shard: How the layer is sharded.
    """
    rows = rows_of(module)
    leaf = name.rpartition(".")[2]
    if leaf == "linear_fc1" and config.gated_linear_unit:
        return {"gate": rows // 2, "up": rows // 2}
    if leaf == "linear_qkv" and config.num_query_groups % shard.size == 0:
        head = config.kv_channels
        key = config.num_query_groups // shard.size * head
        query = config.num_attention_heads // shard.size * head
        if getattr(config, "attention_output_gate", False):  # since 0.16: rows of gates, too
            query *= 2
        if query + 2 * key == rows:
            return {"q": query, "k": key, "v": key}
    return {WHOLE: rows}


def rows_of(module: Any) -> int:
    """Rows of this rank's weight."""
    weight = module.weight0 if hasattr(module, "weight0") else module.weight
    return int(module.output_size_per_partition if weight is None else weight.shape[0])


def order_of(parts: dict[str, int], head: int) -> torch.Tensor | None:
    """The row in the concatenated parts, for each row of the weight.

    Args:
        parts: Rows of each part.
        head: Rows of one key head.

    Returns:
        ``[rows]``, int64; None if the orders are equal.
    """
    if "q" not in parts:
        return None
    groups = parts["k"] // head
    rows = torch.arange(sum(parts.values()))
    blocks = (part.view(groups, -1) for part in rows.split(tuple(parts.values())))
    return torch.cat(tuple(blocks), dim=1).flatten()
