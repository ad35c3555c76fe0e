"""What a Megatron cannot train although it accepts the flags: releases, Megatron-FSDP, sizes.

Options that do not train what they say in some releases are refused there. Megatron-FSDP refuses
nothing of what it cannot do, or silently does wrong, before the model is built; the trainer names
``--zero-stage`` for some of it first (:mod:`mindspeed.training.zero`). Sizes of experts and of
optimizer instances Megatron checks while it builds the model or in the first step, with a traceback
on every rank, or never: ``--num-distributed-optimizer-instances n`` splits the ranks that share
optimizer states into ``n`` groups of equal size, which hold the same states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed.adaptor.versions import in_range, megatron_version
from mindspeed.features.feature import Megatron, Problem, conflict


@dataclass(frozen=True)
class RefusedCombination:
    """A combination that is refused.

    Attributes:
        applies: whether the arguments have the combination.
        flag: as the user types it.
        message: what is wrong.
        fix: what to change.
        versions: range of megatron-core; empty for all.
    """

    applies: Callable[[Megatron], Any]
    flag: str
    message: str
    fix: str
    versions: str = ""

    def problems(self, megatron: Megatron) -> list[Problem]:
        """The error, where the installed release is in the range and the arguments have it."""
        version = megatron_version()
        here = not self.versions or (version is not None and in_range(version, self.versions))
        if here and self.applies(megatron):
            return [Problem(self.flag, self.message, self.fix)]
        return []


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


OF_RELEASES = (
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


_FLAG = "--use-megatron-fsdp"
# Flag of Megatron's -> why it excludes Megatron-FSDP, and what to use instead.
_EXCLUDED = {
    "fp16": (
        "--fp16",
        "the scaled gradient of parameters of which a rank has nothing is looked for",
        "use --bf16",
    ),
    "use_precision_aware_optimizer": (
        "--use-precision-aware-optimizer",
        "that optimizer looks for gradients where Megatron-FSDP puts none, and no weight changes",
        "drop it",
    ),
    "fake_process_group": (
        "--fake-process-group",
        "its check of the shards of all ranks fails where they send nothing",
        "use mindspeed plan --check, which counts the step of any rank",
    ),
    "fsdp_double_buffer": (
        "--fsdp-double-buffer",
        "a buffer is used again while its gradients are still being reduced",
        "drop it",
    ),
    "nccl_ub": (
        "--use-nccl-ub",
        "it implies --fsdp-double-buffer, which uses a buffer again while its gradients are still "
        "being reduced",
        "drop it",
    ),
}


def fsdp_problems(megatron: Megatron) -> Iterator[Problem]:
    """Find what is wrong with Megatron-FSDP in these arguments."""
    if not megatron.get("use_megatron_fsdp"):
        return
    for name, (other, why, fix) in _EXCLUDED.items():
        if megatron.get(name):
            yield conflict(_FLAG, other, why, fix)
    if (stages := megatron.get("pipeline_model_parallel_size") or 1) > 1:
        yield conflict(
            _FLAG,
            f"--pipeline-model-parallel-size {stages}",
            "its groups are made of all ranks, and its checkpoints name layers by their number in "
            "the stage",
            "use --use-distributed-optimizer alone",
        )
    yield from _of_strategy(megatron)


def _of_strategy(megatron: Megatron) -> Iterator[Problem]:
    strategy = megatron.get("data_parallel_sharding_strategy")
    flag = f"{_FLAG} --data-parallel-sharding-strategy {strategy}"
    if strategy == "no_shard":
        yield Problem(
            flag,
            "Megatron-FSDP 0.16.1 does not add up the gradients of data-parallel ranks with "
            "no_shard, its default",
            "choose optim, optim_grads or optim_grads_params, or drop --use-megatron-fsdp, which "
            "shards nothing either",
        )
    if strategy == "optim" and megatron.get("gradient_accumulation_fusion"):
        yield Problem(
            flag,
            "the fused gradient of an output layer replaces the sum of the earlier micro-batches",
            "add --no-gradient-accumulation-fusion, or choose optim_grads",
        )
    if (megatron.get("num_distributed_optimizer_instances") or 1) > 1:
        yield from _of_instances(megatron, strategy)


def _of_instances(megatron: Megatron, strategy: object) -> Iterator[Problem]:
    flag = "--num-distributed-optimizer-instances"
    if strategy == "optim":
        yield Problem(
            flag,
            "Megatron-FSDP does not add up the gradients of the instances with optim",
            "choose optim_grads or optim_grads_params, or drop it",
        )
    if (outer := megatron.get("outer_dp_sharding_strategy") or "no_shard") != "no_shard":
        yield Problem(
            f"--outer-dp-sharding-strategy {outer}",
            "each instance of Megatron-FSDP clips by the norm of its own part of the gradients",
            "drop it",
        )


_INSTANCES = "--num-distributed-optimizer-instances"


def expert_problems(megatron: Megatron) -> Iterator[Problem]:
    """Find what is wrong with the experts of a model."""
    experts, topk = megatron.get("num_experts"), megatron.get("moe_router_topk") or 1
    if not experts:
        return
    if topk > experts:
        yield Problem(
            f"--moe-router-topk {topk}",
            f"is more than --num-experts {experts}",
            f"choose 1 to {experts}",
        )
    if megatron.get("moe_expert_capacity_factor") == 0:
        yield Problem(
            "--moe-expert-capacity-factor 0",
            "leaves experts no room: every token is dropped, so they never learn",
            "give more than 0, or remove the flag: then no token is dropped",
        )
    if megatron.get("optimizer") == "dist_muon":
        yield from _copies_under_muon(megatron)
    if megatron.get("moe_grouped_gemm") and megatron.get("add_bias_linear"):
        yield from _grouped_biases(megatron)
    if megatron.get("add_bias_linear"):
        yield from _fused_biases(megatron)
    if megatron.get("moe_token_dispatcher_type") == "alltoall_seq":
        yield Problem(
            "--moe-token-dispatcher-type alltoall_seq",
            "Megatron has removed it",
            "use alltoall; --moe-tp-extend-ep spreads whole experts over tensor-parallel ranks",
        )


def _copies_under_muon(megatron: Megatron) -> Iterator[Problem]:
    """Check replicas with Muon: Megatron shards nothing if dense layers have one."""
    tensor = megatron.get("tensor_model_parallel_size") or 1
    expert_tensor = megatron.get("expert_tensor_parallel_size") or tensor
    ranks = expert_tensor * (megatron.get("expert_model_parallel_size") or 1)
    copies = (megatron.get("data_parallel_size") or 0) * (
        megatron.get("context_parallel_size") or 1
    )
    if copies == 1 and ranks < tensor:
        yield Problem(
            "--optimizer dist_muon",
            "with one data-parallel rank and several copies of experts the gradient norm counts "
            "every copy",
            "use --optimizer muon",
        )


def _grouped_biases(megatron: Megatron) -> Iterator[Problem]:
    local = megatron.get("transformer_impl") == "local"
    if local or megatron.get("moe_use_legacy_grouped_gemm"):
        spec = "--transformer-impl local" if local else "--moe-use-legacy-grouped-gemm"
        yield Problem(
            f"--moe-grouped-gemm with {spec}",
            "has no biases",
            "add --disable-bias-linear, or use --transformer-impl transformer_engine",
        )
    elif megatron.get("bias_dropout_fusion"):
        yield Problem(
            "--moe-grouped-gemm with biases",
            "does not work with the fusion of bias and dropout, which is on by default",
            "add --no-bias-dropout-fusion, or --disable-bias-linear",
        )


def _fused_biases(megatron: Megatron) -> Iterator[Problem]:
    """Check the fusion of biases and activation, which no experts have that weigh tokens in it."""
    gated = megatron.get("swiglu")
    name = "swiglu" if gated else "gelu"
    grouped = gated and megatron.get("moe_grouped_gemm")  # adds its biases before
    other = megatron.get("quick_geglu") or megatron.get("geglu")
    if megatron.get(f"bias_{name}_fusion") and not (grouped or other):
        yield Problem(
            "--num-experts with biases",
            f"does not work with the fusion of bias and {name}, which is on by default",
            f"add --no-bias-{name}-fusion, or --disable-bias-linear",
        )


def instance_problems(megatron: Megatron) -> Iterator[Problem]:
    """Find conflicts with the given number of instances."""
    count = megatron.get("num_distributed_optimizer_instances") or 1
    if count == 1 or megatron.get("use_megatron_fsdp"):  # whose instances are other groups
        return
    flag = f"{_INSTANCES} {count}"
    if not megatron.get("use_distributed_optimizer", True):
        yield Problem(
            flag,
            "no optimizer states are shared that could have several instances",
            f"add --use-distributed-optimizer (--zero-stage 1), or drop {_INSTANCES}",
        )
    elif megatron.get("reduce_scatter_with_fp32_accumulation"):
        yield Problem(
            flag,
            "gradients of several instances are not accumulated in fp32",
            "drop --reduce-scatter-with-fp32-accumulation, or use one instance",
        )
    for what, size in _sharing(megatron):
        if size % count:
            yield Problem(
                flag,
                f"the ranks that share the states of {what} ({size}) cannot be split into {count}",
                "choose a number that divides them",
            )


def _sharing(megatron: Megatron) -> Iterator[tuple[str, int]]:
    """Number of ranks that shard optimizer states; None if the arguments do not define it."""
    world, pp = megatron.get("world_size"), megatron.get("pipeline_model_parallel_size") or 1
    if not world:
        return
    tp = megatron.get("tensor_model_parallel_size") or 1
    yield "the model", world // (tp * pp)
    if megatron.get("num_experts"):
        etp = megatron.get("expert_tensor_parallel_size") or tp
        ep = megatron.get("expert_model_parallel_size") or 1
        yield "its experts", world // (etp * ep * pp)
