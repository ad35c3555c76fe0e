"""Checks of features that drop activations of experts, and the layers they choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed.features.experts.layer_programs import layer_problems
from mindspeed.features.feature import Megatron, Problem, conflict

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
"""Traits of these features."""
_RECOMPUTED = ("moe", "moe_act")
_OFFLOADED = ("expert_fc1", "moe_act")


def problems_of(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find what no policy can run with.

    Args:
        flag: That asks for it.
        megatron: Megatron's arguments.
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
    """Megatron recomputes the same already, or ``--swap-attention`` does.

    Args:
        flag: That asks for a policy.
        megatron: Megatron's arguments.
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
    """The mixture-of-experts layers of a chunk, and whether each is one of the first.

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
