"""What features of mixture-of-experts layers share: checks of their flags, changes of layers.

    yield from expert_problems(NAME, megatron, gate_problems, all_to_all_problems, layer_problems)
    on_layers(seams, self.name, lambda layer: change(layer, seams.journal, overlap=True))

A check gets the flag that selects the feature, and the arguments; it yields what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Megatron, Problem, conflict
from mindspeed.features.pipeline.plans import has_pairs

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

Check = Callable[[str, Megatron], Iterator[Problem]]
DEEPSPEED = "deepspeed_moe"
"""Value of ``--moe-model-type`` with which DeepSpeed's gate takes the place of the router."""


def on_layers(seams: Seams, owner: str, attach: Callable[[Any], object]) -> None:
    """Attach something to every mixture-of-experts layer of every chunk.

    Args:
        owner: The feature.
        attach: Gets each layer.
    """
    from mindspeed.adaptor.moe import moe_layers

    def attach_to_chunk(model: Any, config: Any, vp_stage: int | None) -> None:
        for layer in moe_layers(model):
            attach(layer)

    seams.chunk.add(attach_to_chunk, owner=owner)


def change_layers(seams: Seams, owner: str, **changes: Any) -> None:
    """Change how the mixture-of-experts layers of every chunk run.

    Args:
        owner: The feature.
        **changes: As for :func:`mindspeed.moe.layer.megatron.change`.
    """
    from mindspeed.moe.layer.megatron import change

    on_layers(seams, owner, lambda layer: change(layer, seams.journal, **changes))


def change_paired_layers(seams: Seams, owner: str, megatron: Megatron, **changes: Any) -> None:
    """The same, also where pairs of a forward and a backward run layers part by part.

    Args:
        owner: The feature.
        **changes: As for :func:`mindspeed.moe.layer.megatron.change`.
    """
    from mindspeed.moe.layer.megatron import change
    from mindspeed.moe.layer.megatron_parts import change_parts

    chosen = change_parts if has_pairs(megatron) else change
    on_layers(seams, owner, lambda layer: chosen(layer, seams.journal, **changes))


def expert_slices(megatron: Megatron) -> int:
    """Number of ranks that share each expert, the expert tensor parallel size."""
    given = megatron.get("expert_tensor_parallel_size")
    return given or megatron.get("tensor_model_parallel_size") or 1


def sends_equally(megatron: Megatron) -> bool:
    """Whether all ranks send the same number of tokens to all experts, so that none are counted."""
    exact = megatron.get("moe_no_drop") and not megatron.get("moe_dynamic_padding")
    return megatron.get("moe_model_type") == DEEPSPEED and not exact


def expert_problems(flag: str, megatron: Megatron, *checks: Check) -> Iterator[Problem]:
    """Find that the model has no experts; if it has, what the checks find.

    Nothing in a framework's configuration, which is checked with the model.
    """
    if "num_experts" not in megatron:
        return
    if not megatron["num_experts"]:
        yield Problem(flag, "the model has no experts", "remove the flag, or add --num-experts")
        return
    for check in checks:
        yield from check(flag, megatron)


def gate_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find DeepSpeed's gate in the place of Megatron's router."""
    if megatron.get("moe_model_type") == DEEPSPEED:
        yield Problem(flag, "is for --moe-model-type megatron_moe", "remove one")


def all_to_all_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find a dispatcher other than the all-to-all."""
    yield from _dispatcher_problems(flag, megatron, ("alltoall",))


def dispatcher_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find a dispatcher that no program runs."""
    yield from _dispatcher_problems(flag, megatron, ("alltoall", "allgather"))


def _dispatcher_problems(
    flag: str, megatron: Megatron, allowed: tuple[str, ...]
) -> Iterator[Problem]:
    dispatcher = megatron.get("moe_token_dispatcher_type") or "alltoall"
    if dispatcher not in (*allowed, "alltoall_seq"):  # every model is refused the latter
        yield Problem(
            flag,
            f"is for the dispatcher {' or '.join(allowed)}, and the dispatcher is {dispatcher}",
            "add --moe-token-dispatcher-type alltoall",
        )


def rank_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find experts that no ranks share."""
    if (megatron.get("expert_model_parallel_size") or 1) * expert_slices(megatron) == 1:
        yield Problem(
            flag,
            "nothing is sent to experts: --expert-model-parallel-size 1 and no tensor-parallel "
            "experts",
            "remove the flag",
        )


def expert_parallel_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find experts that are not spread over ranks."""
    if megatron.get("expert_model_parallel_size") == 1:
        yield Problem(
            flag,
            "--expert-model-parallel-size is 1: nothing is sent by all-to-all",
            "choose 2 or more, or remove the flag",
        )


def whole_expert_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find experts that are cut in slices."""
    if (slices := expert_slices(megatron)) > 1:
        yield Problem(
            flag,
            f"sends tokens to ranks with whole experts, and they are cut in {slices}",
            "add --moe-tp-extend-ep, or --expert-tensor-parallel-size 1",
        )


def hook_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find CUDA graphs, which skip hooks of modules."""
    if megatron.get("cuda_graph_impl") not in (None, "none"):
        yield Problem(
            flag, "counts in a hook, which replayed graphs skip", "give --cuda-graph-impl none"
        )


def layer_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find layers that no program can run."""
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
    """Find options that no policy of what experts keep supports."""
    yield from dispatcher_problems(flag, megatron)
    yield from layer_problems(flag, megatron)
    yield from recomputation_problems(flag, megatron)
    if megatron.get("fine_grained_activation_offloading"):
        for module in _OFFLOADED:
            if module in (megatron.get("offload_modules") or ()):
                yield conflict(flag, f"--offload-modules {module}", _SAME)


def recomputation_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find recomputation of the same tensors by Megatron or ``--swap-attention``."""
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
