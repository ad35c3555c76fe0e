"""Checks of features that plan the memory of activations, and how a plan is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Megatron, Problem

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.memory.layer_rules import ChunkLayers
    from mindspeed.memory.offload import Offload
    from mindspeed.memory.plan import ChunkPlan

_BOTH = "both decide what becomes of the same activations"
EXCLUDES = {
    "overlap_moe_expert_parallel_comm": (
        "its schedule runs parts of layers one by one, never a whole layer"
    ),
    "cpu_offloading": _BOTH,
    "fine_grained_activation_offloading": _BOTH,
    "use_legacy_models": "its layers have no sites",
    "cuda_graph_impl": "a captured graph cannot run parts of itself again",
}
"""Arguments that no plan of activations can run with."""
_RECOMPUTE_LAYERS = (
    "enable_recompute_layers_per_pp_rank",
    "optimize_recomp_communication_level",
    "recompute_in_advance",
)
"""Flags whose features recompute the layers that Megatron would."""


def layer_count_problems(
    flag: str, number_flag: str, wanted: bool, number: int | None, megatron: Megatron
) -> Iterator[Problem]:
    """Find a number of layers without its switch, too large, or with uniform recomputation.

    Args:
        flag: The switch.
        number_flag: The flag of the number of layers.
        wanted: Whether the switch is on.
        number: The number of layers; None: all.
    """
    if number is not None and not wanted:
        yield Problem(number_flag, f"has no effect without {flag}", f"add {flag}, or remove it")
    total = megatron.get("num_layers")
    if number is not None and total and number > total:
        yield Problem(number_flag, f"{number} of {total} layers (--num-layers)", "give fewer")
    if (
        wanted
        and megatron.get("recompute_granularity") == "full"
        and megatron.get("recompute_method") == "uniform"
    ):
        yield Problem(
            flag,
            "has no effect with --recompute-method uniform, which recomputes every layer as a "
            "whole",
            "use --recompute-method block, or remove one",
        )


def selective_problem(flag: str, module: str, megatron: Megatron) -> Iterator[Problem]:
    """Find selective recomputation of the same tensors by Megatron."""
    if megatron.get("recompute_granularity") != "selective":
        return
    if module in (megatron.get("recompute_modules") or ()):
        yield Problem(
            flag, f"--recompute-modules {module} recomputes the same already", "remove one"
        )


def recomputed_layers(megatron: Megatron) -> int:
    """Layers at the start that are recomputed as a whole, by Megatron or by our own plan."""
    by_plan = any(map(megatron.get, _RECOMPUTE_LAYERS))
    block = megatron.get("recompute_method") == "block"
    if block and (by_plan or megatron.get("recompute_granularity") == "full"):
        return megatron.get("recompute_num_layers") or 0
    return 0


def attach_recomputed_outputs(
    seams: Seams,
    feature: str,
    flag: str,
    megatron: Megatron,
    number: int | None,
    chosen: Callable[[Iterable[str]], tuple[str, ...]],
) -> None:
    """Recompute sites and their outputs in the layers after those recomputed as a whole.

    Args:
        flag: Its flag, for messages.
        number: In how many layers of every model chunk; None: all.
        chosen: Gets the sites of a layer, returns those that are recomputed.
    """
    after = recomputed_layers(megatron)
    per_rank = bool(megatron.get("enable_recompute_layers_per_pp_rank"))

    def plan(sites: dict[str, dict[str, Any]], layers: ChunkLayers) -> ChunkPlan:
        from mindspeed.memory.layer_rules import plan_of
        from mindspeed.memory.plan import SiteAction

        first = layers.first(number, after=after, of_rank=per_rank)
        return plan_of(first, lambda layer: chosen(sites[layer]), SiteAction.RECOMPUTE_OUTPUT)

    attach_plan(seams, feature, flag, megatron, plan)


def attach_plan(
    seams: Seams,
    feature: str,
    flag: str,
    megatron: Megatron,
    make: Callable[[dict[str, dict[str, Any]], ChunkLayers], ChunkPlan],
    offload: Offload | None = None,
) -> None:
    """Install a plan on every model chunk.

    Args:
        flag: Its flag, for messages.
        make: Gets the sites of each layer by path, and how layers are counted; returns the plan.
        offload: Copies what the plan offloads; the chunks share it.
    """

    convert = bool(megatron.get("overlap_grad_reduce"))

    def plan_chunk(model: Any, config: Any, vp_stage: int | None) -> None:
        from mindspeed.memory import megatron as engine

        sites = {path: engine.sites_of(layer) for path, layer in engine.layers_of(model).items()}
        plan = make(sites, engine.chunk_layers(model, config, vp_stage))
        engine.refuse_different_plans(plan, flag)
        for layer, actions in plan.layers.items():
            if not actions:
                raise ConfigError(
                    f"{flag}: {layer} has no such computation of its own; its sites are "
                    f"{', '.join(sites[layer])}"
                )
        if plan:
            try:
                engine.install(model, plan, seams.journal, owner=flag, offload=offload)
            except ValueError as error:
                raise ConfigError(f"{flag}: {error}") from None
            if convert:
                convert_linears(model, config, vp_stage)

    seams.chunk.add(plan_chunk, owner=feature)


def convert_linears(model: Any, config: Any, vp_stage: int | None) -> None:
    """Let plans run with ``--overlap-grad-reduce``; a function for the seam ``chunk``.

    Under saved-tensor hooks Megatron's own linear layers return no placeholder of a gradient that
    they have added to main_grad, and the reduction that overlaps backward waits for it.
    """
    from mindspeed.te import local_linears

    if config.gradient_accumulation_fusion:
        local_linears.convert_chunk(model, config, vp_stage)
