"""Checks of features that execute experts' layers as programs."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed.features.feature import Megatron, Problem


def expert_ranks(megatron: Megatron) -> int:
    """Number of ranks that share the experts of a layer."""
    tp = megatron.get("tensor_model_parallel_size") or 1
    slices = megatron.get("expert_tensor_parallel_size") or tp
    return (megatron.get("expert_model_parallel_size") or 1) * slices


def layer_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Layers that no program can run.

    Args:
        flag: That asks for a program.
        megatron: Megatron's arguments.
    """
    tp = megatron.get("tensor_model_parallel_size") or 1
    if tp > 1 and not megatron.get("sequence_parallel"):
        yield Problem(
            flag,
            f"with --tensor-model-parallel-size {tp}, experts train with sequence parallelism only",
            "add --sequence-parallel",
        )
    if megatron.get("moe_shared_expert_overlap"):
        yield Problem(
            flag,
            "and --moe-shared-expert-overlap both choose when shared experts are computed",
            "remove --moe-shared-expert-overlap: --moe-alltoall-overlap-comm hides all-to-all "
            "behind shared experts",
        )
    if megatron.get("moe_latent_size"):
        yield Problem(
            flag,
            "cannot run layers with --moe-latent-size, which project tokens before the dispatch",
            "remove one of them",
        )
    if megatron.get("cuda_graph_impl") not in (None, "none"):
        scope = [str(getattr(one, "name", one)) for one in megatron.get("cuda_graph_scope") or ()]
        if not scope or any(one.startswith(("moe", "full")) for one in scope):
            yield Problem(
                flag,
                "sends numbers of tokens to the host, which a CUDA graph cannot record",
                "give --cuda-graph-scope without parts of experts' layers, such as attn",
            )
