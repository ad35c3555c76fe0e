"""Flags whose jobs are only counted whole: a layer is not the difference of two small runs."""

from __future__ import annotations

import argparse

_DIFFER = {
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "no_rope_freq": "--no-rope-freq",
    "linear_attention_freq": "--linear-attention-freq",
    "heterogeneous_block_specs": "--heterogeneous-layers-config-path",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "context_parallel_cache_interval": "--context-parallel-cache-interval",
    "enable_recompute_layers_per_pp_rank": "--enable-recompute-layers-per-pp-rank",
    "adaptive_recompute_device_size": "--adaptive-recompute-device-size",
    "adaptive_recompute_device_swap": "--adaptive-recompute-device-swap",
    "adaptive_memory_optimization": "--adaptive-memory-optimization",
}
"""By name the flag, where it is not the default."""
_FIRST = (
    "recompute_norm_num_layers",
    "recompute_activation_function_num_layers",
    "moe_zero_memory_num_layers",
)
"""Of the first so many layers of a chunk or a rank."""


def whole_only(args: argparse.Namespace) -> str:
    """What of a job cannot be composed of small runs; empty if everything can.

    Either layers of one kind differ, or what they share is not shared layer by layer.

    Args:
        args: final values.
    """
    values = vars(args)
    for name, flag in _DIFFER.items():
        if values.get(name) and values[name] != -1:
            return f"layers that differ by {flag}"
    if (values.get("zero_stage") or 0) > 1 or values.get("use_megatron_fsdp"):
        return "--zero-stage 2 and 3 (--use-megatron-fsdp)"
    if (values.get("num_distributed_optimizer_instances") or 1) > 1:
        return "--num-distributed-optimizer-instances"
    for name in _FIRST:
        count, block = values.get(name), args.recompute_method == "block"
        if count is not None and (count < args.num_layers or block):
            return f"layers that differ by --{name.replace('_', '-')}"
    uniform = args.recompute_granularity == "full" and args.recompute_method == "uniform"
    if uniform and args.recompute_num_layers > 1:
        return f"layers recomputed in groups of {args.recompute_num_layers}"
    if (plan := values.get("activation_plan")) and _names_layers(plan):
        return "layers that differ by --activation-plan"
    return ""


def _names_layers(path: str) -> bool:
    """Whether rules of an activation plan are of single layers."""
    from mindspeed.memory.layer_rules import largest, rules_of
    from mindspeed.parsing import read_yaml

    return largest(rules_of(read_yaml(path, f"--activation-plan {path}"))) >= 0
