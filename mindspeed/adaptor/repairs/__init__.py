"""Fixes of upstream defects of Megatron, one module per fix.

The docstring of each module states the defect, where it is in Megatron, its symptom, the fix and
the versions of megatron-core that it applies to ("all": every version that
:mod:`mindspeed.adaptor.versions` accepts). ``PATCHES`` holds the patches; the tables below say on
which devices and with which arguments they are needed. Fixes that act while a module is imported
have a function ``install`` instead. A fix is removed once upstream has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.repairs import (
    checkpoint_worker,
    checkpointed_parameters,
    clipped_heads,
    dataset_helpers,
    energy_monitor,
    expert_counts,
    expert_overlap,
    explicit_groups,
    first_report,
    fp32_residual,
    fsdp_generators,
    fsdp_gradients,
    fsdp_swiglu,
    fused_kernels,
    fused_routing_map,
    gated_attention,
    gpu_affinity,
    grouped_experts,
    jit_warmup,
    latent_expert_flops,
    latent_key_gradient,
    layer_comm_types,
    legacy_shards,
    local_spec,
    logged_logits,
    loss_normalisation,
    main_params,
    memory_estimate,
    mla_rope_fusion,
    mtp_layer_spec,
    mtp_packed_roll,
    mtp_recompute,
    mtp_tied_output,
    mtp_token_count,
    muon_gate,
    offloading_state,
    one_rank_regions,
    optimizer_buckets,
    optimizer_groups,
    optimizer_offload,
    optimizer_resume,
    optimizer_schedule,
    optimizer_states,
    packed_batch,
    packed_conversations,
    padding_mask,
    parameter_marks,
    partial_yarn,
    pipeline_sends,
    printed_objects,
    process_groups,
    reduction_stream,
    rerun_checkpoints,
    rng_shards,
    rng_tracker,
    rope_flags,
    router_loss_log,
    router_loss_scale,
    sampler_epochs,
    strided_reduce,
    te_activation,
    uniform_recompute,
    upcycling,
    vision_mask,
    vocabulary_loss,
    window_flops,
    yarn,
    zero_losses,
)
from mindspeed.device import Device
from mindspeed.profiling.model_flops import window_of

_EVERYWHERE = (
    rng_tracker,
    latent_key_gradient,
    first_report,
    jit_warmup,
    sampler_epochs,
    zero_losses,
    printed_objects,
    energy_monitor,
    mtp_packed_roll,
    router_loss_scale,
    expert_counts,
    checkpointed_parameters,
    padding_mask,
    explicit_groups,
    parameter_marks,
    loss_normalisation,
    strided_reduce,
    vision_mask,
    one_rank_regions,
    partial_yarn,
    vocabulary_loss,
    pipeline_sends,
    uniform_recompute,
    expert_overlap,
    reduction_stream,
)
_WITH_SUBSTITUTE = (local_spec,)  # of Transformer Engine: it serves both layer specs
_WITHOUT_CUDA = (fused_kernels, fused_routing_map, dataset_helpers, mla_rope_fusion)
_ON_HOST = (process_groups, yarn)
_FOR_ARGUMENTS: dict[ModuleType, Callable[[Mapping[str, Any]], Any]] = {
    packed_batch: lambda values: values.get("sft"),
    packed_conversations: lambda values: values.get("sft"),
    mtp_layer_spec: lambda values: (
        values.get("mtp_num_layers") and values.get("experimental_attention_variant")
    ),
    mtp_recompute: lambda values: (
        values.get("mtp_num_layers") and values.get("recompute_granularity") == "full"
    ),
    mtp_token_count: lambda values: values.get("mtp_num_layers"),
    mtp_tied_output: mtp_tied_output.needed,
    optimizer_offload: lambda values: values.get("optimizer_cpu_offload"),
    optimizer_buckets: lambda values: values.get("use_distributed_optimizer"),
    optimizer_resume: lambda values: values.get("use_distributed_optimizer"),
    optimizer_schedule: optimizer_schedule.needed,
    optimizer_states: lambda values: (
        values.get("use_distributed_optimizer") or values.get("quant_states")
    ),
    fp32_residual: lambda values: values.get("fp32_residual_connection"),
    gated_attention: lambda values: values.get("attention_output_gate"),
    gpu_affinity: lambda values: values.get("fine_grained_activation_offloading"),
    offloading_state: lambda values: values.get("fine_grained_activation_offloading"),
    latent_expert_flops: lambda values: values.get("moe_latent_size"),
    window_flops: window_of,
    optimizer_groups: lambda values: any(
        values.get(name) for name in ("load", "num_experts", "use_distributed_optimizer")
    ),
    rng_shards: lambda values: values.get("load") and values.get("num_experts"),
    fsdp_generators: lambda values: values.get("use_megatron_fsdp"),
    fsdp_gradients: lambda values: values.get("use_megatron_fsdp"),
    fsdp_swiglu: lambda values: values.get("use_megatron_fsdp") and values.get("swiglu"),
    grouped_experts: lambda values: values.get("moe_grouped_gemm"),
    rerun_checkpoints: lambda values: values.get("rerun_mode", "disabled") != "disabled",
    checkpoint_worker: lambda values: values.get("async_save"),
    memory_estimate: memory_estimate.has_unknown_experts,
    main_params: lambda values: values.get("load_main_params_from_ckpt"),
    clipped_heads: lambda values: values.get("qk_clip"),
    layer_comm_types: layer_comm_types.needed,
    logged_logits: lambda values: values.get("log_max_attention_logit") or values.get("qk_clip"),
    muon_gate: lambda values: (
        values.get("attention_output_gate") and "muon" in str(values.get("optimizer"))
    ),
    te_activation: lambda values: values.get("use_te_activation_func"),
    rope_flags: rope_flags.needed,
    upcycling: lambda values: values.get("moe_use_upcycling"),
    legacy_shards: lambda values: values.get("num_experts"),
    router_loss_log: lambda values: values.get("mtp_num_layers") and values.get("num_experts"),
}


def repairs_for(device: Device, te: str) -> tuple[Patch, ...]:
    """The repairs needed on ``device``, whatever the arguments.

    Args:
        device: the device of this process.
        te: ``substitute`` or ``native`` Transformer Engine.
    """
    has_te = te == "substitute" or find_spec("transformer_engine") is not None
    return (parameter_marks.PATCHES_OF_TRANSFORMER_ENGINE if has_te else ()) + _patches_of(
        (
            *_EVERYWHERE,
            *(_WITH_SUBSTITUTE if te == "substitute" else ()),
            *(_WITHOUT_CUDA if device.name != "cuda" else ()),
            *(_ON_HOST if device.on_host else ()),
        )
    )


def repairs_for_arguments(values: Mapping[str, Any]) -> tuple[Patch, ...]:
    """The repairs that only some of Megatron's options need.

    Args:
        values: Megatron's arguments.
    """
    return _patches_of(module for module, needed in _FOR_ARGUMENTS.items() if needed(values))


def all_repairs() -> tuple[Patch, ...]:
    """Every repair of the library, for the contract check."""
    always = (*_EVERYWHERE, *_WITH_SUBSTITUTE, *_WITHOUT_CUDA, *_ON_HOST)
    every = _patches_of((*always, *_FOR_ARGUMENTS))
    return (*every, *parameter_marks.PATCHES_OF_TRANSFORMER_ENGINE)


def _patches_of(modules: Iterable[ModuleType]) -> tuple[Patch, ...]:
    return tuple(patch for module in modules for patch in module.PATCHES)
