"""The architecture of a checkpoint: compared with that of a run, or taken over by it.

Where a feature makes the model of a run another one than its checkpoint holds, the feature's class
says how (:meth:`mindspeed.features.feature.Feature.recorded`).
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.features.registry import recorded, restored
from mindspeed.models import extra_flags

# Fields that make a model the same model; Megatron-LM's names.
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "normalization",
    "position_embedding_type",
    "untie_embeddings_and_output_weights",
    "add_bias_linear",
    "add_qkv_bias",
    "openai_gelu",
    "qk_layernorm",
    "multi_latent_attention",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    *(name for name in extra_flags.PLAIN if name != "rope_parameters"),
)
# Also taken from a checkpoint with --use-checkpoint-args. Of these, some change which weights there
# are or how large (SHAPES); the others only change how training continues.
SHAPES = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "moe_layer_freq",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "attention_output_gate",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
DETAILS = (
    *SHAPES,
    "seq_length",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_parameters",
    "no_rope_freq",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "apply_rope_fusion",
    "bias_dropout_fusion",
    "window_size",
    "window_attn_skip_freq",
    "model_family",
    *extra_flags.NO_ARCHITECTURE,
    "softmax_scale",
    "softmax_type",
    "layernorm_zero_centered_gamma",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "layernorm_epsilon",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_dtype",
    "moe_apply_probs_on_input",
    "qk_l2_norm",
    "moe_token_dispatcher_type",
)


def check_architecture(args: argparse.Namespace, saved: argparse.Namespace, where: str) -> None:
    """Compare the model of a checkpoint with the one to be trained.

    Raises:
        CheckpointError: lists every field that differs.
    """
    model, saved_model = recorded(vars(args)), recorded(vars(saved))
    differing = []
    for name in ARCHITECTURE:
        ours, theirs = model.get(name), saved_model.get(name)
        if name == "num_query_groups" and not model["group_query_attention"]:
            continue
        if name in saved_model and ours != theirs:
            differing.append(
                f"  --{name.replace('_', '-')}: {theirs} in the checkpoint, now {ours}"
            )
    ours, rows = model.get("vocab_size"), saved_model.get("padded_vocab_size")
    if ours and rows and ours > rows:  # Megatron would leave the other rows as they were drawn
        raise CheckpointError(
            f"{where} has an embedding of {rows:,} entries, the tokenizer {ours:,}: take the "
            "model's own tokenizer, or give the model more entries with mindspeed convert "
            "--added-token-num"
        )
    if differing:
        raise CheckpointError(
            f"{where} holds another model:\n" + "\n".join(differing) + "\n"
            "change these flags, or take them from the checkpoint with --use-checkpoint-args"
        )


def take_architecture(
    args: argparse.Namespace, saved: argparse.Namespace, given: Collection[str] = ()
) -> None:
    """Give ``args`` the architecture of a checkpoint (``--use-checkpoint-args``).

    Args:
        args: values of the run, changed in place.
        saved: values of the run that wrote the checkpoint.
        given: names that the user has set: they stay as they are.

    Raises:
        ConfigError: one of ``given`` contradicts the shape of the weights in the checkpoint, or it
            holds a reward model, and ``args`` are of a model of the next token.
    """
    if getattr(saved, "objective", "") == "reward" != getattr(args, "objective", ""):
        raise ConfigError(
            "the checkpoint holds a reward model, which has a head in place of the output layer: "
            "train it on with mindspeed reward, or write it with mindspeed export --hf"
        )
    taken = _architecture(saved, args)
    contradictions = [
        f"--{name.replace('_', '-')} {getattr(args, name)} contradicts the checkpoint, which has "
        f"{theirs}: drop the flag, or load without --use-checkpoint-args"
        for name, theirs in taken.items()
        if name in given
        and name in (*ARCHITECTURE, *SHAPES)
        and _comparable(name, getattr(args, name), taken) != _comparable(name, theirs, taken)
    ]
    if contradictions:
        raise ConfigError("\n".join(contradictions))
    for name, value in taken.items():
        if name not in given:
            setattr(args, name, value)
    for name in ("tokenizer_type", "tokenizer_model", "vocab_size"):
        if getattr(args, name, None) is None:
            setattr(args, name, getattr(saved, name, None))


def _architecture(saved: argparse.Namespace, args: argparse.Namespace) -> dict[str, Any]:
    """The shape of a checkpoint's model in the run ``args``."""
    model = recorded(vars(saved))
    taken = restored({n: model[n] for n in (*ARCHITECTURE, *DETAILS) if n in model}, vars(args))
    if not taken.get("group_query_attention"):
        taken["num_query_groups"] = None
    return taken


def _comparable(name: str, value: Any, taken: Mapping[str, Any]) -> Any:
    """``4`` and the pattern that it means are the same layers."""
    if name == "moe_layer_freq" and isinstance(value, int):
        return [int(layer % value == 0) for layer in range(taken.get("num_layers", 0))]
    return value
