"""Options that do not train what they say in some releases of Megatron, refused there."""

from __future__ import annotations

from mindspeed.features.compatibility.rule import RefusedCombination
from mindspeed.features.feature import Megatron


def _uses_muon(megatron: Megatron) -> bool:
    return "muon" in str(megatron.get("optimizer"))


def _fuses_down_projection(megatron: Megatron) -> bool:
    sharded = (megatron.get("tensor_model_parallel_size") or 1) > 1
    wrong = sharded or megatron.get("delay_wgrad_compute")
    return bool(megatron.get("mla_down_proj_fusion") and wrong)


def _gathers_weights(megatron: Megatron) -> bool:
    ranks = megatron.get("tensor_model_parallel_size") or 1
    of_experts = megatron.get("expert_tensor_parallel_size") or ranks
    return (
        (megatron.get("gtp_weight_remat_size") or 1) > 1
        or (megatron.get("expert_gtp_weight_remat_size") or 1) > 1
        or (megatron.get("tensor_parallel_num_weight_shards") or 1) > ranks
        or (megatron.get("expert_tensor_parallel_num_weight_shards") or 1) > of_experts
    )


def _replaces_masters_on_every_rank(megatron: Megatron) -> bool:
    replaces = megatron.get("quant_states") or megatron.get("reuse_fp32_param")
    return bool(replaces and not megatron.get("use_distributed_optimizer"))


def _shares_states_of_experts(megatron: Megatron) -> bool:
    several = (megatron.get("num_distributed_optimizer_instances") or 1) > 1
    return several and (megatron.get("expert_model_parallel_size") or 1) > 1


RULES = (
    RefusedCombination(
        _shares_states_of_experts,
        "--num-distributed-optimizer-instances",
        "before megatron-core 0.15 several instances have no expert parallelism",
        "install megatron-core 0.16.1, or drop it",
        versions="<0.15",
    ),
    RefusedCombination(
        lambda megatron: megatron.get("mtp_num_layers"),
        "--mtp-num-layers",
        "before megatron-core 0.15 layers that predict tokens are built and run otherwise, which "
        "no training of this library is tested with",
        "install megatron-core 0.16.1, or drop it",
        versions="<0.15",
    ),
    RefusedCombination(
        lambda megatron: megatron.get("optimizer_cpu_offload"),
        "--optimizer-cpu-offload",
        "before megatron-core 0.15 its host copies do not get what is loaded",
        "install megatron-core 0.16.1, or use --swap-optimizer",
        versions="<0.15",
    ),
    RefusedCombination(
        _uses_muon,
        "--optimizer muon (dist_muon)",
        "megatron-core 0.17 and newer build it on emerging_optimizers 0.2, which no training "
        "of this library is tested with",
        "install megatron-core 0.16.1, or choose another --optimizer",
        versions=">=0.17",
    ),
    RefusedCombination(
        _fuses_down_projection,
        "--mla-down-proj-fusion",
        "with tensor parallelism megatron-core 0.17 and 0.18 split the fused projection at "
        "wrong sizes, and with --delay-wgrad-compute its weight is not trained",
        "drop it",
        versions=">=0.17,<0.19",  # Megatron-LM PR 5383, PR 5273
    ),
    RefusedCombination(
        lambda megatron: megatron.get("mtp_use_repeated_layer"),
        "--mtp-use-repeated-layer",
        "megatron-core 0.17 builds several layers for it",
        "install megatron-core 0.18.2, or drop it",
        versions=">=0.17,<0.18",  # Megatron-LM PR 3965
    ),
    RefusedCombination(
        _gathers_weights,
        "--tensor-parallel-num-weight-shards (--expert-tensor-parallel-num-weight-shards)",
        "no training of this library is tested with more shards of weights than tensor-parallel "
        "ranks",
        "use --zero-stage 3",
        versions=">=0.19",
    ),
    RefusedCombination(
        lambda megatron: megatron.get("dataloader_inter_document_masking"),
        "--dataloader-inter-document-masking",
        "this library finds the borders of documents in the tokens",
        "use --reset-attention-mask --reset-position-ids",
        versions=">=0.19",
    ),
    RefusedCombination(
        _replaces_masters_on_every_rank,
        "--quant-states (--reuse-fp32-param)",
        "megatron-core 0.20 has such optimizers on data-parallel shards only",
        "add --use-distributed-optimizer",
        versions=">=0.20",
    ),
)
