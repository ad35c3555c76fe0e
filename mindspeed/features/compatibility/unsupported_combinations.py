"""Combinations of Megatron's own flags that cannot train, refused before training begins.

Megatron does not check these: they end in a wrong result, a traceback or a hang after the model has
been built. One entry of :data:`RULES` per combination; :mod:`.megatron_limits` checks sizes,
Megatron-FSDP, and what some releases have wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from mindspeed import device, te
from mindspeed.features.compatibility.megatron_limits import (
    OF_RELEASES,
    RefusedCombination,
    expert_problems,
    fsdp_problems,
    instance_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.optimizer.rules import chosen


class UnsupportedCombinations(Feature, level=0):
    """Refuses combinations of Megatron's flags that cannot train.

    Nothing is attached: when one of the rules applies, validation has raised.
    """

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self.problems(megatron))

    def problems(self, megatron: Megatron) -> list[Problem]:
        rules = (rule.problems(megatron) for rule in (*RULES, *OF_RELEASES))
        checks = (expert_problems, fsdp_problems, instance_problems)
        return list(chain(*rules, *(check(megatron) for check in checks)))


def _context_parallel(megatron: Megatron) -> bool:
    return (megatron.get("context_parallel_size") or 1) > 1


def _has_documents(megatron: Megatron) -> bool:
    from mindspeed.attention.packed_batch import adaptive, resets

    packs = resets(megatron) or adaptive(megatron) or bool(megatron.get("sft"))
    return packs or (megatron.get("fix_sub_seq_length") or -1) > 0


def _on_host(megatron: Megatron) -> bool:
    return device.current().on_host


def _without_cuda(megatron: Megatron) -> bool:
    return device.current().name != "cuda"


def _captures_graphs(megatron: Megatron) -> bool:
    old_names = megatron.get("enable_cuda_graph") or megatron.get("external_cuda_graph")
    return bool(old_names) or megatron.get("cuda_graph_impl") not in (None, "none")


def _recomputes_experts(megatron: Megatron) -> bool:
    modules = megatron.get("recompute_modules") or ()
    selected = megatron.get("recompute_granularity") == "selective" and "moe" in modules
    return selected or bool(megatron.get("moe_layer_recompute"))


def _chooses_modules_in_vain(megatron: Megatron) -> bool:
    """Whether modules are named and nothing is selected; configurations name core attention."""
    modules = set(megatron.get("recompute_modules") or ()) - {"core_attn"}
    selects = megatron.get("recompute_granularity") == "selective"
    return bool(modules) and not selects and not megatron.get("recompute_activations")


def _counts_layers_in_vain(megatron: Megatron) -> bool:
    """Whether a method or number is given for layers that nothing recomputes."""
    number = megatron.get("recompute_num_layers") and not megatron.get("swap_attention")
    recomputes = megatron.get("recompute_granularity") or any(
        megatron.get(name)
        for name in (
            "recompute_activations",
            "recompute_in_advance",  # these two name the granularity that they need
            "enable_recompute_layers_per_pp_rank",
        )
    )
    return bool(number or megatron.get("recompute_method")) and not recomputes


def _renormalised_top_1(megatron: Megatron) -> bool:
    return (
        megatron.get("moe_router_topk") == 1
        and megatron.get("moe_router_score_function", "softmax") == "softmax"
        and not megatron.get("moe_router_pre_softmax")
        and megatron.get("moe_router_load_balancing_type") != "sinkhorn"
    )


def _with(flag: str, *conditions: Callable[[Megatron], Any]) -> Callable[[Megatron], bool]:
    return lambda megatron: bool(megatron.get(flag)) and all(c(megatron) for c in conditions)


def _is_adam(megatron: Megatron) -> bool:
    return chosen(megatron) in ("adam", "fused_adam", "cadam")


def _shards_states(megatron: Megatron) -> bool:
    return bool(megatron.get("use_distributed_optimizer") or megatron.get("use_megatron_fsdp"))


def _off(megatron: Megatron, name: str) -> bool:
    """Whether a flag is known and off; a framework may leave it undefined."""
    return name in megatron and not megatron[name]


def _is_narrow(megatron: Megatron) -> bool:
    return bool(megatron.get("bf16") or megatron.get("fp16"))


def _shares_names_of_shards(megatron: Megatron) -> bool:
    tensor = megatron.get("tensor_model_parallel_size") or 1
    shards = megatron.get("expert_tensor_parallel_size") or tensor
    files = megatron.get("save") or megatron.get("load")
    return bool(files and megatron.get("ckpt_format") == "torch" and tensor % shards)


def _splits_parts_of_groups(megatron: Megatron) -> bool:
    groups: int = megatron.get("num_query_groups") or 0
    grouped = groups and megatron.get("group_query_attention", True)
    joint = not megatron.get("multi_latent_attention") and megatron.get("muon_split_qkv", True)
    muon = "muon" in str(megatron.get("optimizer"))
    ranks: int = megatron.get("tensor_model_parallel_size") or 1
    return bool(muon and joint and grouped and groups < ranks)


def _joint_projection_in_parts(megatron: Megatron) -> bool:
    parts = (megatron.get("tensor_model_parallel_size") or 1) > 1
    gated = megatron.get("attention_output_gate")
    return bool((parts or gated) and not megatron.get("multi_latent_attention"))


def _ignores_main_params(megatron: Megatron) -> bool:
    native = te.choose(device.current().name)[0] == "native"
    return bool(
        megatron.get("optimizer_cpu_offload")
        or megatron.get("use_megatron_fsdp")
        or (megatron.get("use_precision_aware_optimizer") and native)
    )


_STORE_STATES = ("quant_states", "reuse_fp32_param", "swap_optimizer", "virtual_optimizer")


def _stored_narrow(name: str) -> RefusedCombination:
    """A dtype of ``OptimizerConfig`` that only the precision-aware optimizer reads."""

    def applies(megatron: Megatron) -> bool:
        other = str(megatron.get(name) or "fp32") not in ("fp32", "torch.float32")
        plain = _off(megatron, "use_precision_aware_optimizer")
        # These features declare the exclusion themselves.
        own = chosen(megatron) == "cadam" or any(map(megatron.get, _STORE_STATES))
        return other and plain and not own

    return RefusedCombination(
        applies,
        "--" + name.replace("_", "-"),
        "no other optimizer stores it in that format",
        "add --use-precision-aware-optimizer, or drop it",
    )


RULES = (
    RefusedCombination(
        _with("softmax_scale", lambda m: m.get("multi_latent_attention")),
        "--softmax-scale",
        "multi-latent attention computes its own scale and does not read it",
        "drop it; --mscale-all-dim and --rotary-scaling-factor change that scale",
    ),
    RefusedCombination(
        lambda m: chosen(m) == "sgd" and _shards_states(m),
        "--optimizer sgd",
        "the distributed optimizer (--use-distributed-optimizer, --zero-stage 1 to 3) saves "
        "the two moments of Adam, and SGD has one",
        "use --optimizer adam, or drop --use-distributed-optimizer",
    ),
    RefusedCombination(
        _with("use_precision_aware_optimizer", lambda m: not _is_adam(m)),
        "--use-precision-aware-optimizer",
        "only Adam stores its states in other formats",
        "use --optimizer adam, or drop it",
    ),
    RefusedCombination(
        _with(
            "use_precision_aware_optimizer",
            _is_adam,
            lambda m: _off(m, "use_distributed_optimizer") and not _shards_states(m),
        ),
        "--use-precision-aware-optimizer",
        "Megatron's is part of the distributed optimizer",
        "add --use-distributed-optimizer; without it there are --reuse-fp32-param, "
        "--release-fp32-grad and --quant-states",
    ),
    *(
        _stored_narrow(name)
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    RefusedCombination(
        _with("optimizer_cpu_offload", lambda m: m.get("decoupled_weight_decay", True) is False),
        "--optimizer-cpu-offload",
        "the Adam on the host decays weights apart from the gradient (AdamW)",
        "leave decoupled_weight_decay True, or drop it",
    ),
    RefusedCombination(
        _with(
            "load_main_params_from_ckpt",
            _is_narrow,
            lambda m: _off(m, "use_distributed_optimizer"),
        ),
        "--load-main-params-from-ckpt",
        "only the distributed optimizer takes its main parameters from a checkpoint",
        "add --use-distributed-optimizer, or drop it",
    ),
    RefusedCombination(
        _with("qk_clip", _is_narrow, lambda m: m.get("use_distributed_optimizer")),
        "--qk-clip",
        "the distributed optimizer has no whole main weights, and the first clipping ends in "
        "a traceback",
        "use --optimizer muon or dist_muon, or drop --use-distributed-optimizer",
    ),
    RefusedCombination(
        _with("qk_clip", _joint_projection_in_parts),
        "--qk-clip",
        "takes the joint weight of queries, keys and values for that of one tensor-parallel "
        "rank without a gate, and the first clipping ends in a traceback",
        "use --multi-latent-attention, or --tensor-model-parallel-size 1 without "
        "--attention-output-gate",
    ),
    RefusedCombination(
        _splits_parts_of_groups,
        "--optimizer muon (dist_muon)",
        "splits the joint weight into the queries, keys and values of whole groups, and with "
        "more tensor-parallel ranks than --num-query-groups a rank has a part of one",
        "use a --tensor-model-parallel-size up to --num-query-groups, or --muon-no-split-qkv",
    ),
    RefusedCombination(
        _with("hybrid_context_parallel", lambda m: m.get("mtp_num_layers")),
        "--hybrid-context-parallel",
        "multi-token prediction shifts tokens among the ranks of the largest group, and the "
        "groups change with every batch",
        "drop it, or --mtp-num-layers",
    ),
    RefusedCombination(
        _with("init_method_xavier_uniform"),
        "--init-method-xavier-uniform",
        "does not reach the output layers of attention and MLP (Megatron-LM's script ends in a "
        "TypeError for it), and with tensor parallelism its bounds are those of a shard",
        "drop it; --init-method-std scales the normal distribution",
    ),
    RefusedCombination(
        _with("full_validation"),
        "--full-validation",
        "runs one iteration a sample instead of one a global batch (with "
        "--multiple-validation-sets), or ends in a TypeError after the first interval",
        "drop it, and give --eval-iters: the samples of the set / --global-batch-size",
    ),
    RefusedCombination(
        _with("num_experts", _shares_names_of_shards),
        "--ckpt-format torch",
        "has one file for a tensor-, pipeline- and expert-parallel rank, and with this "
        "--expert-tensor-parallel-size several ranks with other shards of experts share it",
        "use --ckpt-format torch_dist, or an --expert-tensor-parallel-size that divides "
        "--tensor-model-parallel-size",
    ),
    RefusedCombination(
        _with("load_main_params_from_ckpt", _ignores_main_params),
        "--load-main-params-from-ckpt",
        "this optimizer takes its main parameters from the 16-bit weights all the same",
        "drop it, or use the distributed optimizer without --optimizer-cpu-offload, "
        "--use-megatron-fsdp and the precision-aware one of native Transformer Engine",
    ),
    RefusedCombination(
        _with("optimizer_cpu_offload", lambda m: not m.get("use_precision_aware_optimizer")),
        "--optimizer-cpu-offload",
        "needs the optimizer that keeps gradients and main parameters apart",
        "add --use-precision-aware-optimizer and --use-distributed-optimizer",
    ),
    RefusedCombination(
        _with("optimizer_cpu_offload", lambda m: not (m.get("bf16") or m.get("fp16"))),
        "--optimizer-cpu-offload",
        "needs 16-bit parameters: fp32 ones are views into the gradient buffer's layout, "
        "which no optimizer on the host can own",
        "add --bf16 or --fp16, or drop it",
    ),
    RefusedCombination(
        _with("delay_wgrad_compute", lambda m: m.get("transformer_impl") == "local"),
        "--delay-wgrad-compute",
        "the linear layers of the local layer spec cannot compute weight gradients apart",
        "use --transformer-impl transformer_engine",
    ),
    RefusedCombination(
        _with("overlap_moe_expert_parallel_comm", _has_documents),
        "--overlap-moe-expert-parallel-comm",
        "the schedule plan of a micro-batch does not say where its documents begin",
        "drop it, or train without packed documents",
    ),
    RefusedCombination(
        _with("overlap_moe_expert_parallel_comm", _recomputes_experts),
        "--recompute-modules moe (--moe-layer-recompute)",
        "--overlap-moe-expert-parallel-comm and --moe-fb-overlap run the parts of a mixture of "
        "experts one by one, so the layer as a whole is not recomputed",
        "leave moe out; moe_act recomputes the activations of experts",
    ),
    RefusedCombination(
        _chooses_modules_in_vain,
        "--recompute-modules",
        "only --recompute-granularity selective recomputes modules: it has no effect here",
        "add --recompute-granularity selective in place of another, or leave it out",
    ),
    RefusedCombination(
        _counts_layers_in_vain,
        "--recompute-method, --recompute-num-layers",
        "without --recompute-granularity no layer is recomputed: they have no effect",
        "add --recompute-granularity full, or leave them out",
    ),
    RefusedCombination(
        _with("eod_mask_loss", _context_parallel, lambda m: not m.get("calculate_per_token_loss")),
        "--eod-mask-loss",
        "with context parallelism the ranks have different numbers of tokens with a loss, and "
        "the mean of their means is not the mean of the sequence",
        "add --calculate-per-token-loss",
    ),
    RefusedCombination(
        _with("num_experts", _renormalised_top_1),
        "--moe-router-topk 1",
        "the renormalised probability of a single expert is always 1, which Megatron refuses: "
        "the router would never learn",
        "add --moe-router-pre-softmax, or choose more experts",
    ),
    RefusedCombination(
        _with("cpu_offloading", lambda m: not m.get("cpu_offloading_num_layers")),
        "--cpu-offloading",
        "no layer is offloaded",
        "add --cpu-offloading-num-layers",
    ),
    RefusedCombination(
        _with("cpu_offloading", lambda m: m.get("cpu_offloading_weights")),
        "--cpu-offloading-weights",
        "only activations can be kept in host memory",
        "drop it (--optimizer-cpu-offload keeps optimizer states there)",
    ),
    RefusedCombination(
        _with("record_memory_history", _on_host),
        "--record-memory-history",
        "PyTorch records the history of device memory only, and the CPU has none",
        "drop it, or run on a GPU or NPU",
    ),
    RefusedCombination(
        lambda m: m.get("moe_token_dispatcher_type") == "flex" and _without_cuda(m),
        "--moe-token-dispatcher-type flex",
        "its backends, DeepEP and HybridEP, need NVIDIA GPUs",
        "use alltoall",
    ),
    RefusedCombination(
        _with("batch_invariant_mode", _without_cuda),
        "--batch-invariant-mode",
        "its kernels need Triton on an NVIDIA GPU",
        "drop it; --npu-deterministic makes runs repeat",
    ),
    RefusedCombination(
        lambda m: _captures_graphs(m) and _without_cuda(m),
        "--cuda-graph-impl (--enable-cuda-graph, --external-cuda-graph)",
        "CUDA graphs need an NVIDIA GPU",
        "drop it",
    ),
    RefusedCombination(
        _with("use_torch_fsdp2"),
        "--use-torch-fsdp2 (and --ckpt-format torch_dcp, which goes with it alone)",
        "Megatron's wrapper of torch's FSDP2 ends in a TypeError in the first step of 0.16.1, "
        "on every device (finish_grad_sync has no force_all_reduce)",
        "use --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor",
    ),
    RefusedCombination(
        _with("nccl_ub", _without_cuda),
        "--use-nccl-ub",
        "it registers buffers with NCCL, on NVIDIA GPUs",
        "drop it",
    ),
    RefusedCombination(
        _with("nccl_communicator_config_path", lambda m: device.current().name == "npu"),
        "--nccl-communicator-config-path",
        "it describes communicators of NCCL, and an NPU has none",
        "drop it",
    ),
)
