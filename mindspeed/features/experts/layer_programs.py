"""Checks of features that execute experts' layers as programs, or drop what these keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Megatron, Problem, conflict

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


def change_layers(seams: Seams, owner: str, **changes: Any) -> None:
    """Change how the mixture-of-experts layers of every chunk run.

    Args:
        owner: The feature.
        **changes: As for :func:`mindspeed.moe.layer.megatron.change`.
    """
    from mindspeed.adaptor.moe import moe_layers
    from mindspeed.moe.layer.megatron import change

    def change_chunk(model: Any, config: Any, vp_stage: int | None) -> None:
        for layer in moe_layers(model):
            change(layer, seams.journal, **changes)

    seams.chunk.add(change_chunk, owner=owner)


def expert_ranks(megatron: Megatron) -> int:
    """Number of ranks that share the experts of a layer."""
    tp = megatron.get("tensor_model_parallel_size") or 1
    slices = megatron.get("expert_tensor_parallel_size") or tp
    return (megatron.get("expert_model_parallel_size") or 1) * slices


def layer_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find layers that no program can run.

    Args:
        flag: the flag that selects a program.
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
    if megatron.get("cuda_graph_impl") not in (None, "none"):
        scope = [str(getattr(one, "name", one)) for one in megatron.get("cuda_graph_scope") or ()]
        if not scope or any(one.startswith(("moe", "full")) for one in scope):
            yield Problem(
                flag,
                "sends numbers of tokens to the host, which a CUDA graph cannot record",
                "give --cuda-graph-scope without parts of experts' layers, such as attn",
            )


_SAME = "both decide which activations of experts are kept"
_PARTS = "it computes experts in parts of its own"
_WHOLE = "whole layers are computed again, which leaves nothing of their experts to drop: redundant"
_QUANTISED = "experts keep padded copies of rows, and a second product changes scaling factors"
CONFLICTS = {
    "activation-plan": _SAME,
    "adaptive-memory": _SAME,
    "pipe-experts": _PARTS,
    "recompute-activation-function": _SAME,
    "recompute-communication": _WHOLE,
    "recompute-in-advance": _WHOLE,
    "recompute-in-bubble": _WHOLE,
    "recompute-layers-per-pp-rank": _WHOLE,
}
EXCLUDES = {"cpu_offloading": _SAME, "fp8": _QUANTISED, "fp4": _QUANTISED}
"""Traits of features that drop activations of experts."""
_RECOMPUTED = ("moe", "moe_act")
_OFFLOADED = ("expert_fc1", "moe_act")


def saving_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find options that no policy supports.

    Args:
        flag: the flag that selects it.
    """
    if not megatron["num_experts"]:
        yield Problem(flag, "the model has no experts", "add --num-experts, or remove it")
        return
    dispatcher = megatron.get("moe_token_dispatcher_type")
    if dispatcher not in (None, "alltoall", "allgather"):
        other = f"--moe-token-dispatcher-type {dispatcher}"
        yield conflict(flag, other, fix="use alltoall or allgather")
    yield from layer_problems(flag, megatron)
    yield from recomputation_problems(flag, megatron)
    if megatron.get("fine_grained_activation_offloading"):
        for module in _OFFLOADED:
            if module in (megatron.get("offload_modules") or ()):
                yield conflict(flag, f"--offload-modules {module}", _SAME)


def recomputation_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find recomputation of the same tensors by Megatron or ``--swap-attention``.

    Args:
        flag: the flag that selects a policy.
    """
    granularity = megatron.get("recompute_granularity")
    if granularity == "full":
        yield Problem(
            flag, f"has no effect with --recompute-granularity full: {_WHOLE}", "remove one"
        )
    for module in _RECOMPUTED if granularity == "selective" else ():
        if module in (megatron.get("recompute_modules") or ()):
            yield Problem(
                flag,
                f"has no effect with --recompute-modules {module}, which recomputes the same: "
                "redundant",
                "remove one",
            )
    if megatron.get("swap_attention") and megatron.get("recompute_num_layers") and not granularity:
        yield conflict(
            flag,
            "--swap-attention --recompute-num-layers",
            "MLPs are computed again as a whole, redundant",
            "remove --recompute-num-layers",
        )


def chunk_policies(model: Any, config: Any, vp_stage: int | None, number: int | None) -> Any:
    """The mixture-of-experts layers of a chunk, and whether each is among the first.

    Args:
        model: A chunk, as the seam ``chunk`` gives it.
        config: Its transformer config.
        vp_stage: Number of the chunk among those of its rank.
        number: How many layers of a pipeline stage count as first; None: all.

    Yields:
        The layer and a truth value.
    """
    from mindspeed.adaptor.moe import moe_layers
    from mindspeed.memory.megatron import chunk_layers, layers_of

    first = set(chunk_layers(model, config, vp_stage).first(number, of_rank=True))
    chosen = [module for path, module in layers_of(model).items() if path in first]
    of_first = {id(layer) for module in chosen for layer in moe_layers(module)}
    for layer in moe_layers(model):
        yield layer, id(layer) in of_first
