"""Fields of Megatron's configurations that came after the oldest release that we run with.

The trainer's flags are made from the installed release's fields. A flag of a later release is
refused by its name, and code that asks for its value gets the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

# The first release among those we test -> class (with those that it inherits from) -> name in the
# namespace -> default.
_CAME_WITH: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "0.15.3": {
        "TransformerConfig": {
            "activation_func_clamp_value": None,
            "cache_mla_latents": False,
            "cpu_offloading_double_buffering": False,
            "cuda_graph_impl": "none",
            "delay_wgrad_compute": False,
            "embedding_init_method_std": None,
            "fp4": None,
            "fp4_param_gather": False,
            "fp4_recipe": "nvfp4",
            "fused_single_qkv_rope": False,
            "glu_linear_offset": 0.0,
            "hetereogenous_dist_checkpoint": False,
            "mamba_num_heads": None,
            "mlp_chunks_for_prefill": 1,
            "moe_deepep_num_sms": 20,
            "moe_router_force_load_balancing": False,
            "moe_router_fusion": False,
            "moe_router_padding_for_fp8": False,
            "no_rope_freq": None,
            "original_max_position_embeddings": 4096,
            "overlap_moe_expert_parallel_comm": False,
            "pipeline_model_parallel_layout": None,
            "softmax_type": "vanilla",
            "symmetric_ar_type": None,
            "transformer_impl": "transformer_engine",
            "use_fused_weighted_squared_relu": False,
            "use_kitchen": False,
            "use_mamba_mem_eff_path": True,
            "use_te_activation_func": False,
            "window_attn_skip_freq": None,
        },
        "DistributedDataParallelConfig": {
            "disable_symmetric_registration": False,
            "fsdp_double_buffer": False,
            "keep_fp8_transpose_cache": False,
            "nccl_ub": False,
            "outer_dp_sharding_strategy": "no_shard",
            "reuse_grad_buf_for_mxfp8_param_ag": False,
            "use_megatron_fsdp": False,
        },
        "OptimizerConfig": {
            "decoupled_weight_decay": True,
            "store_param_remainders": True,
        },
    },
    "0.16.1": {
        "TransformerConfig": {
            "attention_output_gate": False,
            "batch_invariant_mode": False,
            "dsa_indexer_head_dim": None,
            "dsa_indexer_loss_coeff": None,
            "dsa_indexer_n_heads": None,
            "dsa_indexer_topk": None,
            "dsa_indexer_use_sparse_loss": False,
            "ep_overlap_early_attn_memory_release": False,
            "experimental_attention_variant": None,
            "fine_grained_activation_offloading": False,
            "fp4_quantizer_factory": None,
            "fp8_quantizer_factory": None,
            "hybrid_context_parallel": False,
            "inference_fuse_tp_communication": False,
            "kitchen_attention_backend": "sdpa",
            "linear_attention_freq": None,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "log_max_attention_logit": False,
            "max_seqlen_per_dp_cp_rank": None,
            "min_offloaded_tensor_size": 1048576,
            "moe_enable_routing_replay": False,
            "moe_flex_dispatcher_backend": "deepep",
            "moe_hybridep_num_sms": 16,
            "moe_latent_size": None,
            "moe_router_padding_for_quantization": False,
            "moe_shared_expert_gate": False,
            "mtp_standalone": False,
            "offload_modules": [],
            "qk_clip": False,
            "qk_clip_alpha": 0.5,
            "qk_clip_threshold": 100,
            "qk_l2_norm": False,
            "use_inference_optimized_layers": False,
            "use_kitchen_attention": False,
        },
        "DistributedDataParallelConfig": {
            "ddp_reduce_scatter_with_fp32_accumulation": False,
            "fsdp_manual_registration": False,
        },
        "OptimizerConfig": {
            "apply_wd_to_qk_layernorm": False,
            "muon_extra_scale_factor": 1.0,
            "muon_fp32_matmul_prec": "medium",
            "muon_momentum": 0.9,
            "muon_num_ns_steps": 5,
            "muon_scale_mode": "spectral",
            "muon_split_qkv": True,
            "muon_tp_mode": "blockwise",
            "muon_use_nesterov": False,
        },
    },
}


@dataclass(frozen=True)
class LaterField:
    """A field that the installed release does not have.

    Attributes:
        name: in the namespace.
        default: what it means not to have it.
        release: the first one with it that we test.
    """

    name: str
    default: Any
    release: str


def later_fields(version: Version | None) -> Iterator[LaterField]:
    """Fields that came after ``version``."""
    for release, classes in _CAME_WITH.items():
        if version is not None and version < Version(release):
            for fields in classes.values():
                for name, default in fields.items():
                    yield LaterField(name, default, release)


DEFAULTS_OF_LAYERS: Mapping[str, Mapping[str, Any]] = {
    f"<{release}": classes["TransformerConfig"] for release, classes in _CAME_WITH.items()
}
"""Range of versions -> field that ``TransformerConfig`` lacks there -> default."""
