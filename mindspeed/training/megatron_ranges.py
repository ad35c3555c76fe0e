"""The ranges of Megatron's own numbers, which its configuration classes do not declare.

Name in the namespace -> range. ``tests/training/test_ranges.py`` requires an entry for every number
that the trainer's parser takes from Megatron Core.
"""

from __future__ import annotations

from mindspeed.ranges import (
    ABOVE_ZERO,
    COUNT,
    FINITE,
    FRACTION,
    LAYERS,
    MAX_SIZE,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    RANKS,
    SIZE,
    Range,
)

_LAYERS_OR_NONE = Range(0, LAYERS.high)
_EXPERTS = Range(1, 1_000_000)
_UNITS = Range(0, 100_000)  # multiprocessors, buffer entries, warm-up steps

_PARALLEL: dict[str, Range] = {
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "hierarchical_context_parallel_sizes",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_distributed_optimizer_instances",
        ),
        RANKS,
    ),
    "max_seqlen_per_dp_cp_rank": SIZE,
    "num_microbatches_with_partial_activation_checkpoints": COUNT,
    "wgrad_deferral_limit": COUNT,
    "microbatch_group_size_per_vp_stage": SIZE,
    "cpu_offloading_num_layers": _LAYERS_OR_NONE,
    "ddp_bucket_size": POSITIVE,
    "suggested_communication_unit_size": POSITIVE,
}

_MODEL: dict[str, Range] = {
    "num_layers": LAYERS,
    "mtp_num_layers": _LAYERS_OR_NONE,
    "decoder_first_pipeline_num_layers": _LAYERS_OR_NONE,
    "decoder_last_pipeline_num_layers": _LAYERS_OR_NONE,
    **dict.fromkeys(
        (
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "kv_channels",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "moe_latent_size",
            "dsa_indexer_n_heads",
            "dsa_indexer_head_dim",
            "dsa_indexer_topk",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "mamba_state_dim",
            "mamba_head_dim",
            "mamba_num_groups",
            "mamba_num_heads",
            "mlp_chunks_for_prefill",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
            "original_max_position_embeddings",
        ),
        SIZE,
    ),
    "hidden_dropout": PROBABILITY,
    "attention_dropout": PROBABILITY,
    "softmax_scale": ABOVE_ZERO,
    "layernorm_epsilon": NOT_NEGATIVE,
    "glu_linear_offset": FINITE,
    "activation_func_clamp_value": ABOVE_ZERO,
    "window_size": Range(0, MAX_SIZE, also=(-1,), shown=False),
    "window_attn_skip_freq": _LAYERS_OR_NONE,
    "no_rope_freq": _LAYERS_OR_NONE,
    "linear_attention_freq": _LAYERS_OR_NONE,
    "qk_clip_alpha": FRACTION,
    "qk_clip_threshold": ABOVE_ZERO,
    "dsa_indexer_loss_coeff": NOT_NEGATIVE,
    "init_method_std": NOT_NEGATIVE,
    "embedding_init_method_std": NOT_NEGATIVE,
    "mtp_loss_scaling_factor": NOT_NEGATIVE,
    "recompute_num_layers": LAYERS,
    "fp8_margin": COUNT,
    "fp8_interval": POSITIVE,
    "fp8_amax_history_len": POSITIVE,
    "num_layers_at_start_in_bf16": _LAYERS_OR_NONE,
    "num_layers_at_end_in_bf16": _LAYERS_OR_NONE,
    "num_experts": _EXPERTS,
    "moe_layer_freq": _LAYERS_OR_NONE,
    "moe_router_topk": _EXPERTS,
    "moe_router_topk_limited_devices": RANKS,
    "moe_router_num_groups": _EXPERTS,
    "moe_router_group_topk": _EXPERTS,
    "moe_router_topk_scaling_factor": ABOVE_ZERO,
    "moe_router_bias_update_rate": NOT_NEGATIVE,
    "moe_aux_loss_coeff": NOT_NEGATIVE,
    "moe_z_loss_coeff": NOT_NEGATIVE,
    "moe_input_jitter_eps": PROBABILITY,
    "moe_expert_capacity_factor": Range(0, above=True, also=(-1,)),
    "moe_deepep_num_sms": _UNITS,
    "moe_hybridep_num_sms": _UNITS,
    "cuda_graph_warmup_steps": _UNITS,
    "mrope_section": SIZE,
    "min_offloaded_tensor_size": COUNT,
    "rotary_scaling_factor": Range(0, above=True),
    "beta_fast": ABOVE_ZERO,
    "beta_slow": ABOVE_ZERO,
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
}

_OPTIMIZER: dict[str, Range] = {
    "lr": NOT_NEGATIVE,
    "min_lr": NOT_NEGATIVE,
    "decoupled_lr": NOT_NEGATIVE,
    "decoupled_min_lr": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "loss_scale": NOT_NEGATIVE,  # 0: dynamic, as in DeepSpeed
    "initial_loss_scale": ABOVE_ZERO,
    "min_loss_scale": ABOVE_ZERO,
    "loss_scale_window": Range(1),
    "hysteresis": POSITIVE,
    "adam_beta1": PROBABILITY,
    "adam_beta2": PROBABILITY,
    "adam_eps": NOT_NEGATIVE,
    "sgd_momentum": PROBABILITY,
    "muon_momentum": PROBABILITY,
    "muon_num_ns_steps": Range(1, 1000),
    "muon_extra_scale_factor": ABOVE_ZERO,
    "optimizer_offload_fraction": FRACTION,
    "clip_grad": NOT_NEGATIVE,
}

MEGATRON_RANGES: dict[str, Range] = {**_PARALLEL, **_MODEL, **_OPTIMIZER}
