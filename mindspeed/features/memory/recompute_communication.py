"""``--optimize-recomp-communication-level``: recomputation without tensor-parallel communication.

Recomputing a layer repeats its collectives. In the second run nothing reads the output of the
linear layer that closes a recomputed region, so neither its product nor its all-reduce or
reduce-scatter runs; with sequence parallelism, inputs gathered in the second run are kept for the
backward that follows, and the gradient that it needs first is gathered meanwhile
(:mod:`mindspeed.tensor_parallel.regions`).

    1    a layer is one region: the second linear layer of the MLP closes it
    2    attention and MLP are a region each: the projection of attention closes one, too

In a layer with experts the second linear layers of all of them close the region, and what brings
their results back to the tokens (``combine``) does not run either. Such a layer is executed as a
program (:mod:`mindspeed.moe`); one that cannot be is recomputed as a whole, and the log says so.

Layers are recomputed by :mod:`mindspeed.memory` instead of Megatron, which gets to see no
granularity, or neither ``mlp`` nor ``moe`` among the modules of a selective one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.memory.activation_memory import EXCLUDES, attach_plan
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.journal import Journal
    from mindspeed.memory.layer_rules import ChunkLayers
    from mindspeed.memory.plan import ChunkPlan

_FLAG = "--optimize-recomp-communication-level"
_GRANULARITY = "--recompute-granularity"
_KINDS = _MLP, _MOE = "mlp", "moe"
_LATENT = (
    "the up-projection of latent experts reads their combined rows, which the second run would skip"
)
logger = logging.getLogger("mindspeed")


class RecomputeCommunication(
    Feature,
    level=2,
    seams=("chunk",),
    excludes={
        **EXCLUDES,
        "fp8": "a second run would change scaling factors",
        "fp4": "a second run would change scaling factors",
    },
    after=(
        "balanced-experts",
        "deepspeed-moe",
        "experts-pipeline",
        "moe-allgather-overlap",
        "moe-alltoall-exchange",
        "moe-overlap",
        "moe-tp-extend-ep",
        "pipe-experts",
        "recompute-layers-per-pp-rank",
    ),
):
    """Recomputation skips communication of tensors and experts whose result nothing reads."""

    optimize_recomp_communication_level: Literal[0, 1, 2] = flag(
        0,
        "recomputation skips the last linear layers of each region, experts' too, and what they "
        "communicate; 1: a layer is one region, 2: its attention and its MLP are",
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.optimize_recomp_communication_level > 0

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        granularity = megatron.get("recompute_granularity")
        if granularity == "full":
            yield from _full_problems(megatron)
        elif granularity == "selective":
            yield from _selective_problems(megatron)
        else:
            yield Problem(
                _FLAG,
                "has no effect without recomputation",
                f"add {_GRANULARITY} full or selective, or remove it",
            )
        if megatron.get("moe_latent_size"):
            yield conflict(_FLAG, "--moe-latent-size", _LATENT)
        if megatron.get("transformer_impl") == "transformer_engine" and _native():
            yield conflict(
                _FLAG,
                "a native Transformer Engine",
                "its linear layers communicate on their own",
                "unset MINDSPEED_TE=native, or use --transformer-impl local",
            )

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        modules = megatron.get("recompute_modules") or ()
        others = [name for name in modules if name != _MLP]
        if megatron.get("recompute_granularity") != "selective" or not others:
            return {"recompute_granularity": None}
        return {} if _MOE in others else {"recompute_modules": others}  # layers are told

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        full = megatron.get("recompute_method") is not None  # the granularity has been corrected
        block = megatron.get("recompute_method") == "block"
        number = megatron.get("recompute_num_layers") if block else None
        per_rank = bool(megatron.get("enable_recompute_layers_per_pp_rank"))
        modules = megatron.get("recompute_modules") or ()
        kinds = [_MLP] if _MOE not in modules else [kind for kind in _KINDS if kind in modules]
        programs = weakref.WeakSet[Any]()

        def plan(sites: dict[str, dict[str, Any]], layers: ChunkLayers) -> ChunkPlan:
            from mindspeed.memory.layer_rules import plan_of, regions_of
            from mindspeed.memory.plan import SiteAction

            if not full:
                found = tuple(path for path in sites if _kind(sites[path]) in kinds)
                return plan_of(found, lambda layer: (_MLP,), SiteAction.RECOMPUTE)
            chosen = layers.first(number, of_rank=per_rank)
            level = self.optimize_recomp_communication_level
            return plan_of(
                chosen, lambda layer: regions_of(sites[layer], level), SiteAction.RECOMPUTE
            )

        def run_programs(model: Any, config: Any, vp_stage: int | None) -> None:
            programs.update(_programs(model, config, seams.journal))

        def enter_regions(model: Any, config: Any, vp_stage: int | None) -> None:
            _enter_regions(model, config, vp_stage, programs)

        seams.chunk.add(run_programs, owner=self.name)
        attach_plan(seams, self.name, _FLAG, megatron, plan)
        seams.chunk.add(enter_regions, owner=self.name)


def _native() -> bool:
    from mindspeed import device, te

    return te.choose(device.current().name)[0] == "native"


def _full_problems(megatron: Megatron) -> Iterator[Problem]:
    """Find what Megatron refuses for the original granularity, and what regions do not support."""
    method, number = megatron.get("recompute_method"), megatron.get("recompute_num_layers")
    if method not in ("uniform", "block"):
        yield Problem(
            "--recompute-method",
            f"{_GRANULARITY} full needs uniform or block, got {method}",
            "give one of them",
        )
    if not number:
        yield Problem(
            "--recompute-num-layers",
            f"{_GRANULARITY} full needs a number of layers, got {number}",
            "give at least 1",
        )
    if method == "uniform" and (number or 1) > 1:
        yield conflict(
            _FLAG,
            f"--recompute-method uniform --recompute-num-layers {number}",
            "a region is a layer at most",
            "give --recompute-num-layers 1",
        )
    if megatron.get("distribute_saved_activations"):
        yield conflict(_FLAG, "--distribute-saved-activations")


def _selective_problems(megatron: Megatron) -> Iterator[Problem]:
    modules = megatron.get("recompute_modules") or ["core_attn"]
    if _MOE in modules:
        if not megatron.get("num_experts", 1):
            yield Problem(
                f"--recompute-modules {_MOE}", "the model has no experts", f"give {_MLP} instead"
            )
    elif _MLP not in modules:
        yield Problem(
            _FLAG,
            f"has no effect with --recompute-modules {' '.join(modules)}: no linear layer closes "
            "what they recompute",
            f"add {_MLP} or {_MOE} to --recompute-modules, or use {_GRANULARITY} full",
        )
    elif megatron.get("num_experts") and megatron.get("moe_layer_freq") in (None, 1):
        yield Problem(
            _FLAG,
            f"has no effect with --recompute-modules {_MLP}: every layer has experts",
            f"give --recompute-modules {_MOE}, or use {_GRANULARITY} full",
        )


def _kind(sites: Container[str]) -> str:
    """The module of ``--recompute-modules`` that the MLP of a layer with these sites is."""
    if f"{_MLP}.experts" in sites:
        return _MOE
    return _MLP if f"{_MLP}.linear_fc2" in sites else ""


def _programs(model: Any, config: Any, journal: Journal) -> Iterator[Any]:
    """Let experts' layers run as programs, and no layer recompute on its own.

    Yields:
        Those that do; the log names the reason for others.
    """
    from mindspeed.adaptor.moe import moe_layers
    from mindspeed.memory.megatron import layers_of
    from mindspeed.moe.dispatch.choice import DISPATCHERS
    from mindspeed.moe.layer.megatron import change

    for layer in layers_of(model).values():
        layer.recompute_mlp = False
    for layer in moe_layers(model):
        layer.moe_layer_recompute = False
        if config.moe_token_dispatcher_type not in DISPATCHERS:
            reason = f"the token dispatcher is {config.moe_token_dispatcher_type}"
        elif config.moe_shared_expert_overlap:
            reason = "--moe-shared-expert-overlap orders what it computes"
        elif not hasattr(layer, "shared_experts_compute"):
            reason = "programs need megatron-core 0.16"
        elif getattr(config, "moe_latent_size", None):
            reason = _LATENT
        else:
            change(layer, journal)
            yield layer
            continue
        logger.info(
            "%s: experts of layer %s are recomputed whole: %s", _FLAG, layer.layer_number, reason
        )


def _enter_regions(model: Any, config: Any, vp_stage: int | None, programs: Container[Any]) -> None:
    """Tell layers which of them closes the region that is computed again."""
    from mindspeed.memory import megatron as engine
    from mindspeed.memory.plan import ATTENTION_SUBLAYER, LAYER, MLP_SUBLAYER
    from mindspeed.te import local_linears
    from mindspeed.tensor_parallel.megatron import closing_parts
    from mindspeed.tensor_parallel.regions import Closing, RecomputedRegion

    runtime = engine.runtime_of(model)
    if runtime is None:
        return
    closing: dict[tuple[str, str], Closing] = {}
    for path, layer in engine.layers_of(model).items():
        found = closing_parts(layer, programs)
        for part, sites in (
            (_MLP, (LAYER, MLP_SUBLAYER, _MLP)),
            ("self_attention", (ATTENTION_SUBLAYER, "self_attention")),
        ):
            closing |= {(path, site): found.get(part, Closing()) for site in sites}
        local_linears.convert_chunk(layer, config, vp_stage)
    runtime.region = lambda layer, site: RecomputedRegion(closing.get((layer, site), Closing()))
