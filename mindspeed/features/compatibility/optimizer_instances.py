"""Several instances of the distributed optimizer: what Megatron asserts while it builds the model.

``--num-distributed-optimizer-instances n`` splits the ranks that share optimizer states into ``n``
groups of equal size, which hold the same states.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed.features.feature import Megatron, Problem

_NAME = "--num-distributed-optimizer-instances"


def problems(megatron: Megatron) -> Iterator[Problem]:
    """Find what excludes the given number of instances."""
    count = megatron.get("num_distributed_optimizer_instances") or 1
    if count == 1 or megatron.get("use_megatron_fsdp"):  # whose instances are other groups
        return
    flag = f"{_NAME} {count}"
    if not megatron.get("use_distributed_optimizer", True):
        yield Problem(
            flag,
            "no optimizer states are shared that could have several instances",
            f"add --use-distributed-optimizer (--zero-stage 1), or drop {_NAME}",
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
    """Number of ranks that share optimizer states, where the arguments say it."""
    world, pp = megatron.get("world_size"), megatron.get("pipeline_model_parallel_size") or 1
    if not world:
        return
    tp = megatron.get("tensor_model_parallel_size") or 1
    yield "the model", world // (tp * pp)
    if megatron.get("num_experts"):
        etp = megatron.get("expert_tensor_parallel_size") or tp
        ep = megatron.get("expert_model_parallel_size") or 1
        yield "its experts", world // (etp * ep * pp)
