"""Sizes of experts and of optimizer instances with which nothing trains.

Megatron checks them while it builds the model or in the first step, with a traceback on every rank,
or never. ``--num-distributed-optimizer-instances n`` splits the ranks that share optimizer states
into ``n`` groups of equal size, which hold the same states.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed.features.feature import Megatron, Problem

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
