"""Megatron's transformer layers: the parts of a module's spec, and what closes a region.

A spec is a ``ModuleSpec`` or a class; that of an MLP is, since megatron-core 0.18, what builds it
with the submodules bound.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch

from mindspeed.tensor_parallel.regions import Closing


def closing_parts(layer: Any, programs: Container[Any] = ()) -> dict[str, Closing]:
    """The last linear layers of attention and MLP, where only bias-dropout-add follows them.

    Decided by structure: a layer, attention or MLP of any other class (cross attention, a norm
    after the sublayer) has none, because what follows may read the output.

    Args:
        programs: Mixture-of-experts layers that run as programs (:mod:`mindspeed.moe`); others are
            of another class.

    Returns:
        For ``self_attention`` and ``mlp``.
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
    found: dict[str, Closing] = {}
    attention, mlp = layer.self_attention, layer.mlp
    no_cross_attention = (
        type(layer.cross_attention) is IdentityOp
        and type(layer.pre_cross_attn_layernorm) is IdentityOp
        and type(layer.cross_attn_bda) is IdentityFuncOp
    )
    known_attention = type(attention) in (SelfAttention, MLASelfAttention) and no_cross_attention
    if known_attention and layer.self_attn_bda is get_bias_dropout_add:
        found["self_attention"] = Closing([(attention.linear_proj, attention)])
    if layer.mlp_bda is get_bias_dropout_add:
        if type(mlp) is MLP:
            found["mlp"] = Closing([(mlp.linear_fc2, mlp)])
        elif mlp in programs:
            found["mlp"] = closing_experts(mlp)
    return found


def closing_experts(layer: Any) -> Closing:
    """The second linear layers of routed and shared experts, and the way back of the results."""
    # The first is that of experts with stacked weights.
    chains: list[tuple[torch.nn.Module, ...]] = [(layer.experts, layer)]
    for module in layer.experts.modules():
        if hasattr(module, "linear_fc2"):
            around = (module, layer.experts) if module is not layer.experts else (module,)
            chains.append((module.linear_fc2, *around, layer))
    shared = layer.shared_experts if layer.use_shared_expert else None
    if shared is not None and not shared.use_shared_expert_gate:  # the gate's gradient reads it
        chains.append((shared.linear_fc2, shared, layer))
    return Closing(chains, layer)


def class_of(spec: Any) -> Any:
    """The class that is built."""
    from megatron.core.transformer.spec_utils import get_module

    if not isinstance(spec, functools.partial):
        return get_module(spec)
    build: Any = spec.func  # a class, or a method of it
    return build.__self__ if inspect.ismethod(build) else build


def submodules_of(spec: Any) -> Any:
    """The dataclass of its submodules; None without."""
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    return getattr(spec, "submodules", None)


def with_submodules(spec: Any, **modules: Any) -> Any:
    """The same spec with these submodules instead of those of the same names."""
    submodules = replace(submodules_of(spec), **modules)
    if isinstance(spec, functools.partial):
        return functools.partial(spec, submodules=submodules)
    return replace(spec, submodules=submodules)
