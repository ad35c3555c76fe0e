"""Linear layers that close a region of Megatron's transformer layers."""

from __future__ import annotations

from typing import Any

import torch


def closing_linears(layer: Any) -> dict[str, tuple[torch.nn.Module, ...]]:
    """The last linear layer of attention and MLP, where only bias-dropout-add follows it.

    Decided by structure: a layer, attention or MLP of any other class (experts, cross attention, a
    norm after the sublayer) has none, because what follows may read the output.

    Returns:
        ``self_attention`` or ``mlp`` -> the linear layer and the module that returns its output.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer import transformer_layer
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    known = ("TransformerLayer", "MoETransformerLayer")  # the second since 0.16
    if type(layer) not in [getattr(transformer_layer, name, None) for name in known]:
        return {}
    found: dict[str, tuple[torch.nn.Module, ...]] = {}
    attention, mlp = layer.self_attention, layer.mlp
    no_cross_attention = (
        type(layer.cross_attention) is IdentityOp
        and type(layer.pre_cross_attn_layernorm) is IdentityOp
        and type(layer.cross_attn_bda) is IdentityFuncOp
    )
    known_attention = type(attention) in (SelfAttention, MLASelfAttention) and no_cross_attention
    if known_attention and layer.self_attn_bda is get_bias_dropout_add:
        found["self_attention"] = attention.linear_proj, attention
    if type(mlp) is MLP and layer.mlp_bda is get_bias_dropout_add:
        found["mlp"] = mlp.linear_fc2, mlp
    return found
