"""``--balanced-moe-experts``: hot experts are computed where their tokens are.

In every layer and micro-batch the ranks choose the same few experts from the counts of rows: one
after the other the largest expert of the fullest rank. Their weights go to all ranks, their tokens
stay, and their gradients come back. The fullest rank, for which all others wait, has less to
compute; the weights' way hides behind permutation and dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    all_to_all_problems,
    change_layers,
    expert_parallel_problems,
    expert_problems,
    gate_problems,
    whole_expert_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.flags import flag
from mindspeed.ranges import SIZE

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--balanced-moe-experts"
_EXPERTS = "hot experts are grouped experts without adapters or fp8"
_LAYER = "both decide how rows reach the experts"
_LATER = "gradients of hot experts go back to their owners at once, not later"
_SHARDS = "weights of experts must be whole on their owner"


class BalancedExperts(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    conflicts={
        "ampipe": _LAYER,
        "dualpipev": _LATER,
        "experts-pipeline": _LAYER,
        "moe-adaptive-recompute": "both act against full ranks",
        "moe-alltoall-exchange": _LAYER,
        "moe-zero-memory": "rows that were dropped come back with all experts of a token",
        "nanopipe": _LATER,
        "pipe-experts": _LAYER,
    },
    excludes={
        "fp8": _EXPERTS,
        "fp8_format": _EXPERTS,
        "lora_target_modules": _EXPERTS,
        "moe_expert_capacity_factor": "tokens are dropped where experts are hot",
        "moe_shared_expert_overlap": _LAYER,
        "pipeline_schedule": _LATER,
        "use_megatron_fsdp": _SHARDS,
        "use_torch_fsdp2": _SHARDS,
    },
):
    """Hot experts are computed where their tokens are."""

    balanced_moe_experts: bool = flag(
        False, "compute hot experts where their tokens are, chosen anew for every micro-batch"
    )
    balanced_moe_hot_expert_num: int = flag(3, "hot experts of a layer", range=SIZE)
    trans_hot_expert_group_num: int = flag(
        3, "messages in which the weights of a layer's hot experts are sent", range=SIZE
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not self.balanced_moe_experts:
            flags = "--balanced-moe-hot-expert-num and --trans-hot-expert-group-num"
            yield Problem(flags, f"have no effect without {NAME}", "add it, or remove them")
            return
        yield from expert_problems(
            NAME,
            megatron,
            gate_problems,
            all_to_all_problems,
            whole_expert_problems,
            expert_parallel_problems,
            self._experts,
        )

    def _experts(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        if (megatron.get("zero_stage") or 0) > 1:
            yield conflict(name, f"--zero-stage {megatron['zero_stage']}", fix="choose stage 1")
        local = megatron.get("transformer_impl", "transformer_engine") != "transformer_engine"
        legacy = megatron.get("moe_use_legacy_grouped_gemm")
        if local or legacy or not megatron.get("moe_grouped_gemm", True):
            yield Problem(
                name,
                "needs one weight for each grouped expert",
                "give --moe-grouped-gemm and --transformer-impl transformer_engine",
            )
        if megatron.get("add_bias_linear"):
            yield Problem(name, "is for experts without biases", "give --disable-bias-linear")
        ep = megatron.get("expert_model_parallel_size") or 1
        hot, experts = self.balanced_moe_hot_expert_num, megatron["num_experts"] // ep
        if hot > experts:
            yield Problem(
                f"--balanced-moe-hot-expert-num {hot}",
                f"is more than the {experts} experts of a rank",
                f"choose 1 to {experts}",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        hot = self.balanced_moe_hot_expert_num
        change_layers(
            seams,
            self.name,
            hot_experts=hot,
            hot_messages=min(self.trans_hot_expert_group_num, hot, 8),
            dropped=True,  # copies of hot experts leave the rows that are sent
        )
