"""A GPT model as Megatron describes it: the values of its flags that belong to the model.

A Hugging Face ``config.json`` becomes one of these (:meth:`ModelConfig.from_flags`, with the flags
that the family table reads from it); weight sources, converters and checkpoints take it as the
namespace of Megatron-LM's names (:meth:`ModelConfig.namespace`). It says nothing about a training:
learning rate, batch, data and duration belong to the run that loads the model.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.models.extra_flags import ModelExtras

# Flags with one value per router, or a list of them in Megatron.
_LISTS = ("moe_aux_loss_coeff", "moe_router_load_balancing_type")
# What a checkpoint says besides the model: written by one rank, without a training.
_ONE_RANK: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "world_size": 1,
    "data_parallel_size": 1,
    "data_parallel_random_init": False,
    "use_distributed_optimizer": False,
    "ckpt_format": "torch_dist",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelExtras):
    """One model, complete: fields are Megatron's flags, defaults are Megatron's.

    Attributes:
        extra: Other flags that a family sets: one of another package may need more of Megatron's,
            or those of its own features.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    seq_length: int
    model_family: str | None = None
    padded_vocab_size: int
    make_vocab_size_divisible_by: int = 128
    mask_padded_vocab: bool = True
    untie_embeddings_and_output_weights: bool = False
    transformer_impl: str = "transformer_engine"
    tokenizer_type: str = "NullTokenizer"
    tokenizer_model: str | None = None
    params_dtype: torch.dtype = torch.float32
    bf16: bool = False
    fp16: bool = False

    # Norms, activation and biases.
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    swiglu: bool = False
    squared_relu: bool = False
    quick_geglu: bool = False
    openai_gelu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02

    # Attention and positions.
    group_query_attention: bool = False
    num_query_groups: int = 1
    window_size: tuple[int, int] | None = None
    experimental_attention_variant: str | None = None
    softmax_type: str = "vanilla"
    window_attn_skip_freq: int | list[int] | None = None
    apply_query_key_layer_scaling: bool = False
    position_embedding_type: str = "learned_absolute"
    add_position_embedding: bool = True
    use_rotary_position_embeddings: bool = False
    apply_rope_fusion: bool = True
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_seq_len_interpolation_factor: int | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    no_rope_freq: int | list[int] | None = None
    rope_type: str | None = None
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    # Multi-head latent attention.
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    # Mixture of experts, multi-token prediction.
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_layer_freq: int | list[int] = 1
    moe_grouped_gemm: bool = False
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_dtype: str | None = None
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_token_dispatcher_type: str = "allgather"
    mtp_num_layers: int | None = None

    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], **others: Any) -> ModelConfig:
        """A model from the flags that a family reads from ``config.json``.

        Args:
            flags: Megatron's flags, from :meth:`mindspeed.models.family.Family.read`.
            **others: Fields that no ``config.json`` has, such as ``transformer_impl``.

        Raises:
            TypeError: A flag without a default is missing.
        """
        values = {
            "seq_length": flags["max_position_embeddings"],
            "padded_vocab_size": flags["vocab_size"],
            **flags,
            **others,
        }
        if values.get("position_embedding_type") != "rope":
            values["apply_rope_fusion"] = False
        if values.get("add_bias_linear", cls.add_bias_linear):
            values["add_qkv_bias"] = True
        if values.get("num_experts") and not values.get("moe_ffn_hidden_size"):
            values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
        for field in dataclasses.fields(cls):
            value = values.get(field.name)
            if "float" in str(field.type) and isinstance(value, int):
                values[field.name] = float(value)
            if field.name in _LISTS and field.name in values and not isinstance(value, list):
                values[field.name] = [values[field.name]]
        extra = {name: values.pop(name) for name in values.keys() - cls._names()}
        return cls(**values, extra=extra)

    def namespace(self) -> argparse.Namespace:
        """The values under Megatron-LM's names, as a checkpoint of one rank stores them."""
        fields = {name: getattr(self, name) for name in self._names()}
        return argparse.Namespace(**fields, **self.extra, **_ONE_RANK)

    @classmethod
    def _names(cls) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)} - {"extra"}
