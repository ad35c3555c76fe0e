"""What Megatron Core's configuration classes do not declare of their flags.

Spellings, defaults and choices of Megatron-LM, switches of earlier releases, and ranges.
``tests/training/test_ranges.py`` requires a range for every number that the trainer's parser takes
from Megatron Core.

Of flags of earlier versions and other trainers, an alias means exactly what its flag means. An
ignored flag changes no result: it chose what is the only way today, tunes speed or memory by a
method that is not part of this trainer, or controls a service of Megatron-LM's (restarts,
stragglers, NVIDIA's loggers). They are accepted so that old scripts run, and rank 0 says once at
the start which have no effect and why. A flag that changes results is never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mindspeed.attention.strategy import COMM_TYPE_NOT_GIVEN
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

# Field of a Megatron Core class -> (spelling on the command line, name in the namespace).
SPELLING: dict[str, tuple[str, str]] = {
    "num_moe_experts": ("--num-experts", "num_experts"),
    "num_layers_in_first_pipeline_stage": (
        "--decoder-first-pipeline-num-layers",
        "decoder_first_pipeline_num_layers",
    ),
    "num_layers_in_last_pipeline_stage": (
        "--decoder-last-pipeline-num-layers",
        "decoder_last_pipeline_num_layers",
    ),
    "apply_rope_fusion": ("--rope-fusion", "apply_rope_fusion"),
    "overlap_p2p_comm": ("--overlap-p2p-communication", "overlap_p2p_comm"),
    "use_te_rng_tracker": ("--te-rng-tracker", "te_rng_tracker"),
    "fp4": ("--fp4-format", "fp4"),
    "fp4_param": ("--fp4-param-gather", "fp4_param_gather"),
    "fp8": ("--fp8-format", "fp8"),
    "add_bias_linear": ("--disable-bias-linear", "add_bias_linear"),
    "perform_initialization": ("--no-initialization", "perform_initialization"),
    "layernorm_epsilon": ("--norm-epsilon", "layernorm_epsilon"),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", "layernorm_zero_centered_gamma"),
    "barrier_with_L1_time": ("--no-barrier-with-level-1-timing", "barrier_with_L1_time"),
    "microbatch_group_size_per_vp_stage": (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "microbatch_group_size_per_vp_stage",
    ),
    "overlap_p2p_comm_warmup_flush": (
        "--overlap-p2p-communication-warmup-flush",
        "overlap_p2p_comm_warmup_flush",
    ),
    "use_mamba_mem_eff_path": ("--disable-mamba-mem-eff-path", "use_mamba_mem_eff_path"),
    "fp8_param": ("--fp8-param-gather", "fp8_param_gather"),
    "bucket_size": ("--ddp-bucket-size", "ddp_bucket_size"),
    "average_in_collective": ("--ddp-average-in-collective", "ddp_average_in_collective"),
    "pad_buckets_for_high_nccl_busbw": (
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "ddp_pad_buckets_for_high_nccl_busbw",
    ),
    "reduce_scatter_with_fp32_accumulation": (
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "ddp_reduce_scatter_with_fp32_accumulation",
    ),
    "nccl_ub": ("--use-nccl-ub", "nccl_ub"),
}

# Name in the namespace -> Megatron-LM's default where it is not the library's.
DEFAULT: dict[str, Any] = {
    "num_layers": None,  # before 0.16 their fields begin with 0
    "hidden_size": None,
    "num_attention_heads": None,
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
    "persist_layer_norm": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": True,
    "overlap_p2p_comm": True,
    "align_param_gather": True,
    "attention_softmax_in_fp32": False,
    "min_lr": 0.0,
    "optimizer_offload_fraction": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "rotary_scaling_factor": 1.0,
    "cp_comm_type": COMM_TYPE_NOT_GIVEN,
    "mtp_loss_scaling_factor": 0.1,
    "muon_momentum": 0.9,
}

# Words of flags that the library declares as any text or any data type; Megatron-LM's choices.
CHOICES: dict[str, tuple[str, ...]] = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_tp_mode": ("blockwise", "duplicated", "distributed"),
    "muon_fp32_matmul_prec": ("medium", "high", "highest"),
}

# Switch of earlier releases -> name and value that replace it.
OLD_SWITCHES: dict[str, tuple[str, str]] = {
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "external_cuda_graph": ("cuda_graph_impl", "transformer_engine"),
}

# Set from other values (mindspeed.training.configs), so they are no flags.
DERIVED = {
    "virtual_pipeline_model_parallel_size",
    "params_dtype",
    "pipeline_dtype",
    "autocast_dtype",
    "enable_autocast",
    "variable_seq_lengths",
    "batch_p2p_comm",
    "deallocate_pipeline_outputs",
    "gated_linear_unit",
    "bias_activation_fusion",
    "grad_reduce_in_fp32",
    "check_for_nan_in_grad",
    "use_custom_fsdp",
    "inference_sampling_seed",
    "moe_token_dropping",
    "cuda_graph_scope",
}

# Fields that the trainer reads itself, so that a release need not have them: their values.
READ_BY_THE_TRAINER = {"transformer_impl": ("local", "transformer_engine")}

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

# Name in the namespace -> range.
MEGATRON_RANGES: dict[str, Range] = {**_PARALLEL, **_MODEL, **_OPTIMIZER}


ALIASES = {
    "--layernorm-epsilon": "--norm-epsilon",
    "--no-add-bias-linear": "--disable-bias-linear",
    "--local_rank": "--local-rank",
    "--add-gate": "--swiglu",
    "--no-add-gate": "--no-swiglu",
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--encoder-num-layers": "--num-layers",
    "--encoder-seq-length": "--seq-length",
    "--muon-no-split-qkv": "--no-muon-split-qkv",
}

# Why a flag has no effect -> the flags, without a value, with one, and with several.
_REASONS: dict[str, tuple[str, str, str]] = {
    "it is the only way here": (
        """
        --no-contiguous-buffers-in-local-ddp --use-mcore-models --use-dist-ckpt
        --no-create-attention-mask-in-dataloader
        --auto-detect-ckpt-format --no-scatter-gather-tensors-in-pipeline --log-throughput
        --log-timers-to-tensorboard --exit-signal-handler-for-dataloader
        --tokenizer-hf-use-fast --disable-msc --ckpt-fully-parallel-load
        """,
        "--DDP-impl --data-impl --dist-ckpt-format --lazy-mpu-init",
        "",
    ),
    "positions are what --position-embedding-type says": ("--no-position-embedding", "", ""),
    "padding always follows the samples, so causal attention does not see it": (
        "--padding-attention-mask",
        "",
        "",
    ),
    "--deepspeed_config says all there is": ("--deepspeed", "", ""),
    "it tunes or watches a service of Megatron-LM's that is not part of this trainer": (
        """
        --no-one-logger --onnx-safe --bert-no-binary-head --no-manual-gc-eval
        --disable-manual-gc-eval --disable-jit-fuser --ckpt-assume-constant-structure
        --use-persistent-ckpt-worker --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap --legacy-tokenizer --log-progress
        --log-device-memory-used --log-world-size-to-tensorboard --log-energy --log-straggler
        --disable-straggler-on-startup --run-workload-inspector-server --one-logger-async
        --enable-experimental --check-for-spiky-loss --enable-ft-package --calc-ft-timeouts
        --adlr-autoresume --use-sharp
        """,
        """
        --timing-log-level --timing-log-option --empty-unused-memory-level
        --check-weight-hash-across-dp-replicas-interval --train-sync-interval
        --distributed-timeout-seconds-after-init --sharp-enabled-group --log-memory-interval
        --logging-level --straggler-ctrlr-port --straggler-minmax-count --one-logger-project
        --one-logger-run-name --app-tag-run-name --app-tag-run-version --rerun-mode
        --ft-num-warmup-iters --adlr-autoresume-interval
        """,
        "--high-priority-stream-groups",
    ),
}

# Spelling -> number of values, or argparse's "*".
IGNORED: dict[str, int | str] = {}
# Spelling -> why it has no effect.
WHY: dict[str, str] = {}
_COUNTS: tuple[int | str, ...] = (0, 1, "*")
for _reason, _flags in _REASONS.items():
    for _spellings, _count in zip(_flags, _COUNTS, strict=True):
        IGNORED |= dict.fromkeys(_spellings.split(), _count)
        WHY |= dict.fromkeys(_spellings.split(), _reason)


def without_effect(given: Iterable[str]) -> Iterator[str]:
    """A line for each reason: the flags of a command line that change nothing, and why.

    Args:
        given: spellings of flags, or whole sentences about something that is not done.
    """
    by_reason: dict[str, list[str]] = {}
    for flag in dict.fromkeys(given):
        by_reason.setdefault(WHY.get(flag, ""), []).append(flag)
    for reason, flags in by_reason.items():
        yield f"without effect: {' '.join(flags)}" + (f" ({reason})" if reason else "")
