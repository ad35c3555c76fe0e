"""The sizes of a model by short names, and what it has, from Megatron's flags.

Rules and layouts speak of ``shape["hidden"]`` or ``"qk_norm" in shape.has``; this is the only place
that knows how Megatron spells them.
"""

from __future__ import annotations

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
    value = lambda name: getattr(args, name, None) or 0  # noqa: E731
    heads, head = args.num_attention_heads, args.kv_channels
    grouped = value("group_query_attention")
    groups = args.num_query_groups if grouped else heads
    vocab = value("vocab_size") or args.padded_vocab_size
    experts = value("num_experts")
    gated = value("swiglu") or value("quick_geglu") or value("geglu")
    expert_ffn = value("moe_ffn_hidden_size") or args.ffn_hidden_size
    shared_ffn = value("moe_shared_expert_intermediate_size")
    halves = 2 if gated else 1
    sizes = {
        "hidden": args.hidden_size,
        "ffn": args.ffn_hidden_size,
        "vocab": vocab,
        "padded_vocab": args.padded_vocab_size or vocab,
        "head": head,
        "heads": heads,
        "query": heads * head,
        "key": groups * head,
        "qkv": (heads * (2 if value("attention_output_gate") else 1) + 2 * groups) * head,
        "fc1": halves * args.ffn_hidden_size,
        "experts": experts,
        "expert_ffn": expert_ffn,
        "expert_fc1": halves * expert_ffn,
        "shared_ffn": shared_ffn,
        "shared_fc1": halves * shared_ffn,
        "positions": value("max_position_embeddings"),
        "mtp": value("mtp_num_layers"),
        "two_hidden": 2 * args.hidden_size,
        "gated_query": 2 * heads * head,
        "one": 1,
    }
    latent = value("multi_latent_attention")
    if latent:
        rope = args.qk_pos_emb_head_dim
        sizes |= {
            "q_lora": value("q_lora_rank"),
            "kv_lora": args.kv_lora_rank,
            "kv_down": args.kv_lora_rank + rope,
            "q_up": heads * (args.qk_head_dim + rope),
            "kv_up": heads * (args.qk_head_dim + args.v_head_dim),
            "value": heads * args.v_head_dim,
        }
    score = value("objective") == "reward"  # instead of the output layer
    has = {
        "untied": args.untie_embeddings_and_output_weights and not score,
        "score": score,
        "qkv_bias": value("add_qkv_bias") or args.add_bias_linear,
        "proj_bias": value("add_dense_bias") or args.add_bias_linear,
        "qk_norm": value("qk_layernorm") and not latent and not value("qk_norm_after_rope"),
        "qk_norm_after_rope": value("qk_norm_after_rope"),
        "heads_norm": value("qk_norm_over_all_heads"),
        "input_norms": value("norm_placement") != "post",
        "output_norms": value("norm_placement") in ("post", "pre_and_post"),
        "latent": latent,
        "q_lora": latent and value("q_lora_rank"),
        "direct_q": latent and not value("q_lora_rank"),
        "expert_bias": value("moe_router_enable_expert_bias"),
        "shared_expert": shared_ffn,
        "shared_gate": shared_ffn and value("moe_shared_expert_gate"),
        "gated": gated,
        "norm_bias": value("normalization") != "RMSNorm",
        "sinks": value("softmax_type") == "learnable",
        "mlp_bias": args.add_bias_linear,
        "positions": value("position_embedding_type") == "learned_absolute",
    }
    moe = moe_pattern(vars(args)) if experts else [False] * args.num_layers
    delta_net = value("experimental_attention_variant") == "gated_delta_net"
    if delta_net:
        sizes |= {
            "delta_key_heads": args.linear_num_key_heads,
            "delta_heads": args.linear_num_value_heads,
            "delta_key": args.linear_num_key_heads * args.linear_key_head_dim,
            "delta_value": args.linear_num_value_heads * args.linear_value_head_dim,
            "delta_value_head": args.linear_value_head_dim,
            "delta_taps": args.linear_conv_kernel_dim,
        }
    return Shape(
        MappingProxyType(sizes),
        frozenset(name for name, there in has.items() if there),
        tuple(bool(layer) for layer in moe),
        tuple(linear_pattern(vars(args))),
    )
