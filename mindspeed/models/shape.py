"""The sizes of a model by short names, and what it has, from Megatron's flags.

Rules and layouts speak of ``shape["hidden"]`` or ``"qk_norm" in shape.has``; this is the only place
that knows how Megatron spells them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mindspeed.profiling.model_flops import linear_pattern, moe_pattern

# Sizes -> the keys of config.json that they come from, for messages.
CONFIG_KEYS = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "head": "head_dim",
    "query": "num_attention_heads and head_dim",
    "key": "num_key_value_heads and head_dim",
    "qkv": "num_attention_heads and hidden_size",
    "experts": "the number of experts",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "n_shared_experts and moe_intermediate_size",
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "kv_down": "kv_lora_rank and qk_rope_head_dim",
    "q_up": "num_attention_heads, qk_nope_head_dim and qk_rope_head_dim",
    "kv_up": "num_attention_heads, qk_nope_head_dim and v_head_dim",
    "value": "num_attention_heads and v_head_dim",
    "two_hidden": "hidden_size",
}


@dataclass(frozen=True)
class Shape:
    """Sizes and traits of one model.

    Attributes:
        sizes: Numbers of rows and columns by name, see :func:`shape_of`.
        has: Names of the optional parts that are there.
        moe_layers: For each layer, whether its MLP is a mixture of experts.
        linear_layers: For each layer, whether its attention is linear.
    """

    sizes: Mapping[str, int]
    has: frozenset[str]
    moe_layers: tuple[bool, ...]
    linear_layers: tuple[bool, ...]

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return len(self.moe_layers)


def shape_of(args: Any) -> Shape:
    """The shape of the model that ``args`` describe.

    Args:
        args: A namespace with Megatron-LM's names, complete (resolved or from a checkpoint), with
            ``vocab_size`` and ``padded_vocab_size``.
    """
    flags = vars(args)
    moe = moe_pattern(flags) if flags.get("num_experts") else [False] * args.num_layers
    sizes = _sizes(args)
    if flags.get("multi_latent_attention"):
        sizes |= _latent_sizes(args)
    if flags.get("experimental_attention_variant") == "gated_delta_net":
        sizes |= _delta_sizes(args)
    return Shape(
        MappingProxyType(sizes),
        frozenset(name for name, there in _traits(args).items() if there),
        tuple(bool(layer) for layer in moe),
        tuple(linear_pattern(flags)),
    )


def _value(args: Any, name: str) -> Any:
    """A flag; 0 where a checkpoint does not know it, or it has no value."""
    return getattr(args, name, None) or 0


def _is_gated(args: Any) -> bool:
    return any(_value(args, name) for name in ("swiglu", "quick_geglu", "geglu"))


def _sizes(args: Any) -> dict[str, int]:
    """Sizes that every model has."""
    heads, head = args.num_attention_heads, args.kv_channels
    groups = args.num_query_groups if _value(args, "group_query_attention") else heads
    vocab = _value(args, "vocab_size") or args.padded_vocab_size
    expert_ffn = _value(args, "moe_ffn_hidden_size") or args.ffn_hidden_size
    shared_ffn = _value(args, "moe_shared_expert_intermediate_size")
    halves = 2 if _is_gated(args) else 1
    return {
        "hidden": args.hidden_size,
        "ffn": args.ffn_hidden_size,
        "vocab": vocab,
        "padded_vocab": args.padded_vocab_size or vocab,
        "head": head,
        "heads": heads,
        "query": heads * head,
        "key": groups * head,
        "qkv": (heads * (2 if _value(args, "attention_output_gate") else 1) + 2 * groups) * head,
        "fc1": halves * args.ffn_hidden_size,
        "experts": _value(args, "num_experts"),
        "expert_ffn": expert_ffn,
        "expert_fc1": halves * expert_ffn,
        "shared_ffn": shared_ffn,
        "shared_fc1": halves * shared_ffn,
        "positions": _value(args, "max_position_embeddings"),
        "mtp": _value(args, "mtp_num_layers"),
        "two_hidden": 2 * args.hidden_size,
        "gated_query": 2 * heads * head,
        "one": 1,
    }


def _latent_sizes(args: Any) -> dict[str, int]:
    heads, rope = args.num_attention_heads, args.qk_pos_emb_head_dim
    return {
        "q_lora": _value(args, "q_lora_rank"),
        "kv_lora": args.kv_lora_rank,
        "kv_down": args.kv_lora_rank + rope,
        "q_up": heads * (args.qk_head_dim + rope),
        "kv_up": heads * (args.qk_head_dim + args.v_head_dim),
        "value": heads * args.v_head_dim,
    }


def _delta_sizes(args: Any) -> dict[str, int]:
    return {
        "delta_key_heads": args.linear_num_key_heads,
        "delta_heads": args.linear_num_value_heads,
        "delta_key": args.linear_num_key_heads * args.linear_key_head_dim,
        "delta_value": args.linear_num_value_heads * args.linear_value_head_dim,
        "delta_value_head": args.linear_value_head_dim,
        "delta_taps": args.linear_conv_kernel_dim,
    }


def _traits(args: Any) -> dict[str, Any]:
    """The optional parts, and whether they are there."""
    value = functools.partial(_value, args)
    latent, score = value("multi_latent_attention"), value("objective") == "reward"
    shared, after_rope = value("moe_shared_expert_intermediate_size"), value("qk_norm_after_rope")
    return {
        "untied": args.untie_embeddings_and_output_weights and not score,
        "score": score,  # instead of the output layer
        "qkv_bias": value("add_qkv_bias") or args.add_bias_linear,
        "proj_bias": value("add_dense_bias") or args.add_bias_linear,
        "qk_norm": value("qk_layernorm") and not latent and not after_rope,
        "qk_norm_after_rope": after_rope,
        "heads_norm": value("qk_norm_over_all_heads"),
        "input_norms": value("norm_placement") != "post",
        "output_norms": value("norm_placement") in ("post", "pre_and_post"),
        "latent": latent,
        "q_lora": latent and value("q_lora_rank"),
        "direct_q": latent and not value("q_lora_rank"),
        "expert_bias": value("moe_router_enable_expert_bias"),
        "shared_expert": shared,
        "shared_gate": shared and value("moe_shared_expert_gate"),
        "gated": _is_gated(args),
        "norm_bias": value("normalization") != "RMSNorm",
        "sinks": value("softmax_type") == "learnable",
        "mlp_bias": args.add_bias_linear,
        "positions": value("position_embedding_type") == "learned_absolute",
    }
