"""Combinations of Megatron's flags that cannot train are refused; those next to them are not."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from tests.support.refusal import refusal

OFFLOAD = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DELAYED = OVERLAP | {"delay_wgrad_compute": True}
LAYERS = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}

SGD = {"optimizer": "sgd"}
AWARE = {"use_precision_aware_optimizer": True}
SHARDS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "expert_tensor_parallel_size": 2,
    "ckpt_format": "torch",
    "save": "folder",
}
WHOLE = {"use_distributed_optimizer": False}
PLAIN = {"use_precision_aware_optimizer": False}

COPIES = {
    "optimizer": "dist_muon", "num_experts": 4, "moe_router_topk": 2, "data_parallel_size": 1,
    "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
}  # fmt: skip
FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}
OPTIM = FSDP | {"data_parallel_sharding_strategy": "optim"}
INSTANCES = {"num_distributed_optimizer_instances": 2}
FUSION = {"gradient_accumulation_fusion": True}
SHARED_INSTANCES = {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True}

CLIP = {"qk_clip": True}
FEW_GROUPS = {"optimizer": "muon", "tensor_model_parallel_size": 4, "num_query_groups": 2}

REFUSED = {
    "muon-few-groups": (FEW_GROUPS, "--optimizer muon .*more tensor-parallel ranks"),
    "hybrid-mtp": (
        {"hybrid_context_parallel": True, "mtp_num_layers": 1},
        "--hybrid-context-parallel: multi-token",
    ),
    "clip-sharded": (
        CLIP | {"bf16": True, "use_distributed_optimizer": True},
        "--qk-clip: the distributed optimizer has no whole",
    ),
    "clip-parts": (CLIP | {"tensor_model_parallel_size": 2}, "--qk-clip: takes the joint weight"),
    "clip-gate": (CLIP | {"attention_output_gate": True}, "--qk-clip: takes the joint weight"),
    "mla-scale": (
        {"softmax_scale": 0.5, "multi_latent_attention": True},
        "--softmax-scale: multi-latent attention computes its own",
    ),
    "instances-whole": (
        SHARED_INSTANCES | WHOLE,
        "-instances 2: no .*add --use-distributed-optimizer",
    ),
    "instances-fp32-sums": (
        SHARED_INSTANCES | {"reduce_scatter_with_fp32_accumulation": True},
        "-instances 2: .*drop --reduce-scatter-with-fp32-accumulation",
    ),
    "instances-uneven": (
        SHARED_INSTANCES | {"world_size": 6, "tensor_model_parallel_size": 2},
        "model .3.",
    ),
    "instances-experts": (
        SHARED_INSTANCES | {"world_size": 4, "num_experts": 4, "expert_model_parallel_size": 4},
        "the states of its experts .1. cannot be split",
    ),
    "sgd-sharded": (SGD | {"use_distributed_optimizer": True}, "--optimizer sgd: .*SGD has one"),
    "sgd-fsdp": (SGD | {"use_megatron_fsdp": True}, "--optimizer sgd: .*--zero-stage"),
    "sgd-aware": (SGD | AWARE, "--use-precision-aware-optimizer: only Adam"),
    "muon-aware": ({"optimizer": "muon"} | AWARE, "--use-precision-aware-optimizer: only Adam"),
    "aware-whole": (AWARE | WHOLE, "--use-precision-aware-optimizer: .*add --use-distributed"),
    "main-params": (PLAIN | {"main_params_dtype": "fp16"}, "--main-params-dtype: no other"),
    "main-grads": (PLAIN | {"main_grads_dtype": "torch.bfloat16"}, "--main-grads-dtype: no other"),
    "first-moment": (PLAIN | {"exp_avg_dtype": "fp8"}, "--exp-avg-dtype: no other"),
    "second-moment": (PLAIN | {"exp_avg_sq_dtype": "bf16"}, "--exp-avg-sq-dtype: no other"),
    "offload-l2": (
        OFFLOAD | {"bf16": True, "decoupled_weight_decay": False},
        "--optimizer-cpu-offload: .*AdamW",
    ),
    "load-main-params": (
        WHOLE | {"bf16": True, "load_main_params_from_ckpt": True},
        "--load-main-params-from-ckpt: .*add --use-distributed-optimizer",
    ),
    "xavier": (
        {"init_method_xavier_uniform": True},
        "--init-method-xavier-uniform: does not reach .*--init-method-std",
    ),
    "full-validation": ({"full_validation": True}, "--full-validation: .*give --eval-iters"),
    "shared-shards": (SHARDS | {"tensor_model_parallel_size": 1}, "--ckpt-format torch: .*_dist"),
    "offload-main-params": (
        OFFLOAD | {"bf16": True, "load_main_params_from_ckpt": True},
        "--load-main-params-from-ckpt: .*without --optimizer-cpu-offload",
    ),
    "offload-plain-optimizer": ({"optimizer_cpu_offload": True, "bf16": True}, "-precision-aware"),
    "offload-fp32": (OFFLOAD, "--bf16 or --fp16"),
    "delayed-local": (DELAYED | {"transformer_impl": "local"}, "transformer_engine"),
    "overlap-documents": (OVERLAP | {"reset_attention_mask": True}, "where its documents begin"),
    "overlap-recomputed-layer": (
        OVERLAP | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
        "--recompute-modules moe .*leave moe out",
    ),
    "overlap-layer-recompute": (
        OVERLAP | {"moe_layer_recompute": True},
        "--recompute-modules moe .*--moe-layer-recompute",
    ),
    "modules-unselected": (
        {"recompute_granularity": None, "recompute_modules": ["core_attn", "moe_act"]},
        "--recompute-modules: .*no effect here.*add --recompute-granularity selective",
    ),
    "modules-of-nothing": (
        {"recompute_modules": ["mlp"]},
        "--recompute-modules: .*no effect here",
    ),
    "modules-of-whole-layers": (
        {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
        "--recompute-modules: .*no effect here",
    ),
    "layers-of-nothing": (
        {"recompute_granularity": None, "recompute_num_layers": 2, "recompute_in_bubble": True},
        "--recompute-num-layers: .*no effect.*add --recompute-granularity full",
    ),
    "layers-of-bubbles": (
        {"recompute_num_layers": 2, "recompute_in_bubble": True},
        "--recompute-num-layers: .*no effect",
    ),
    "layers-of-pairs": (
        {"recompute_num_layers": 2, "moe_fb_overlap": True},
        "--recompute-num-layers: .*no effect",
    ),
    "method-of-nothing": (
        {"recompute_granularity": None, "recompute_method": "block", "swap_attention": True},
        "--recompute-method, .*no effect",
    ),
    "overlap-conversations": (OVERLAP | {"sft": True}, "where its documents begin"),
    "uneven-loss-mask": ({"eod_mask_loss": True, "context_parallel_size": 2}, "per-token-loss"),
    "offload-no-layer": ({"cpu_offloading": True}, "--cpu-offloading-num-layers"),
    "top-1": ({"num_experts": 4, "moe_router_topk": 1}, "--moe-router-pre-softmax"),
    "offload-weights": (LAYERS | {"cpu_offloading_weights": True}, "only activations"),
    "muon-copies": (COPIES, "--optimizer dist_muon: .*use --optimizer muon"),
    "fsdp-fp16": (FSDP | {"fp16": True}, "--use-megatron-fsdp: .* --fp16: .*use --bf16"),
    "fsdp-aware": (
        FSDP | AWARE,
        "combined with --use-precision-aware-optimizer: .*no weight chang",
    ),
    "fsdp-stages": (FSDP | {"pipeline_model_parallel_size": 2}, "parallel-size 2: its groups"),
    "fsdp-fake": (FSDP | {"fake_process_group": True}, "--fake-process-group: .*mindspeed plan"),
    "fsdp-buffers": (
        FSDP | {"fsdp_double_buffer": True},
        "with --fsdp-double-buffer: .*still being",
    ),
    "fsdp-user-buffers": (FSDP | {"nccl_ub": True}, "with --use-nccl-ub: it implies --fsdp-double"),
    "fsdp-fusion": (
        OPTIM | FUSION,
        "optim: the fused gradient .*--no-gradient-accumulation-fusion",
    ),
    "fsdp-instances": (OPTIM | INSTANCES, "optimizer-instances: .*choose optim_grads or"),
    "fsdp-outer": (
        FSDP | INSTANCES | {"outer_dp_sharding_strategy": "optim"},
        "--outer-dp-sharding-strategy optim: .*its own part",
    ),
    "memory-history": ({"record_memory_history": True}, "device memory only"),
}
ACCEPTED = {
    "modules-by-default": {"recompute_granularity": None, "recompute_modules": ["core_attn"]},
    "modules-of-activations": {
        "recompute_granularity": None,
        "recompute_activations": True,
        "recompute_modules": ["mlp"],
    },
    "muon-groups": FEW_GROUPS | {"num_query_groups": 4},
    "muon-whole": FEW_GROUPS | {"muon_split_qkv": False},
    "muon-all-heads": FEW_GROUPS | {"num_query_groups": 1, "group_query_attention": False},
    "clip-fp32": CLIP | {"use_distributed_optimizer": True},
    "clip-latent": CLIP | {"tensor_model_parallel_size": 2, "multi_latent_attention": True},
    "instances": SHARED_INSTANCES | {"world_size": 4, "tensor_model_parallel_size": 2},
    "instances-experts": SHARED_INSTANCES
    | {"world_size": 4, "num_experts": 4, "expert_model_parallel_size": 2},
    "sgd": SGD | WHOLE,
    "sgd-unsaid": SGD,
    "aware-unsaid": AWARE | {"exp_avg_dtype": "fp8"},
    "fp32-moments": PLAIN | {"exp_avg_dtype": "torch.float32", "main_grads_dtype": "fp32"},
    "cadam": {"optimizer": "cadam", "use_distributed_optimizer": True},
    "load-main-params": {
        "bf16": True,
        "load_main_params_from_ckpt": True,
        "use_distributed_optimizer": True,
    },
    "offload": OFFLOAD | {"bf16": True},
    "delayed": DELAYED | {"transformer_impl": "transformer_engine"},
    "overlap-local": OVERLAP | {"transformer_impl": "local"},
    "overlap-recomputed-activation": OVERLAP
    | {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "per-token": {
        "eod_mask_loss": True,
        "context_parallel_size": 2,
        "calculate_per_token_loss": True,
    },
    "one-rank": {"eod_mask_loss": True, "context_parallel_size": 1},
    "top-1-softmax": {"num_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top-2": {"num_experts": 4, "moe_router_topk": 2},
    "shards": SHARDS | {"tensor_model_parallel_size": 4},
    "fsdp": FSDP | FUSION | INSTANCES | {"outer_dp_sharding_strategy": "no_shard"},
    "fsdp-optim": OPTIM
    | {"gradient_accumulation_fusion": False, "pipeline_model_parallel_size": 1},
    "layers": LAYERS | {"cpu_offloading_weights": False},
    "muon-experts": COPIES | {"expert_model_parallel_size": 2},
    "muon-replicas": COPIES | {"data_parallel_size": 2},
    "fp32": {"use_precision_aware_optimizer": True},
}


@pytest.mark.parametrize("case", REFUSED)
def test_combination_is_refused(case):
    values, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text):
        resolve(values, "cpu")


@pytest.mark.parametrize("case", ACCEPTED)
def test_combination_is_accepted(case):
    assert not refusal(ACCEPTED[case])
