"""``--optimize-recomp-communication-level``: recomputation without tensor-parallel communication.

Recomputing a layer repeats its collectives. In the second run nothing reads the output of the
linear layer that closes a recomputed region, so neither its product nor its all-reduce or
reduce-scatter runs; with sequence parallelism, inputs gathered in the second run are kept for the
backward that follows, and the gradient that it needs first is gathered meanwhile
(:mod:`mindspeed.tensor_parallel.regions`).

    1    a layer is one region: the second linear layer of the MLP closes it
    2    attention and MLP are a region each: the projection of attention closes one, too

Layers are recomputed by :mod:`mindspeed.memory` instead of Megatron, which gets to see no
granularity, or no ``mlp`` among the modules of a selective one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.memory.activation_memory import EXCLUDES, attach_plan
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.memory.plan import ChunkPlan
    from mindspeed.memory.presets import ChunkLayers

_FLAG = "--optimize-recomp-communication-level"
_GRANULARITY = "--recompute-granularity"
_MLP = "mlp"


class RecomputeCommunication(
    Feature,
    level=2,
    seams=("chunk",),
    excludes={
        **EXCLUDES,
        "fp8": "a second run would change scaling factors",
        "fp4": "a second run would change scaling factors",
    },
    after=("recompute-layers-per-pp-rank",),
):
    """Recomputation skips tensor-parallel communication whose result nothing reads."""

    optimize_recomp_communication_level: Literal[0, 1, 2] = flag(
        0,
        "recomputation skips the last linear layer of each region and what it communicates; "
        "1: a layer is one region, 2: its attention and its MLP are",
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
        if megatron.get("transformer_impl") == "transformer_engine" and _native():
            yield conflict(
                _FLAG,
                "a native Transformer Engine",
                "its linear layers communicate on their own",
                "unset MINDSPEED_TE=native, or use --transformer-impl local",
            )

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        others = [name for name in megatron.get("recompute_modules") or () if name != _MLP]
        if megatron.get("recompute_granularity") == "selective" and others:
            return {"recompute_modules": others}
        return {"recompute_granularity": None}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        full = megatron.get("recompute_method") is not None  # the granularity has been corrected
        block = megatron.get("recompute_method") == "block"
        number = megatron.get("recompute_num_layers") if block else None
        per_rank = bool(megatron.get("enable_recompute_layers_per_pp_rank"))

        def plan(sites: dict[str, dict[str, Any]], layers: ChunkLayers) -> ChunkPlan:
            from mindspeed.memory.plan import SiteAction
            from mindspeed.memory.presets import plan_of, regions_of

            if not full:
                dense = tuple(path for path in sites if f"{_MLP}.linear_fc2" in sites[path])
                return plan_of(dense, lambda layer: (_MLP,), SiteAction.RECOMPUTE)
            chosen = layers.first(number, of_rank=per_rank)
            level = self.optimize_recomp_communication_level
            return plan_of(
                chosen, lambda layer: regions_of(sites[layer], level), SiteAction.RECOMPUTE
            )

        attach_plan(seams, self.name, _FLAG, megatron, plan)
        seams.chunk.add(_enter_regions, owner=self.name)


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
    if _MLP not in modules:
        yield Problem(
            _FLAG,
            f"has no effect with --recompute-modules {' '.join(modules)}: no linear layer closes "
            "what they recompute",
            f"add {_MLP} to --recompute-modules, or use {_GRANULARITY} full",
        )
    elif megatron.get("num_experts") and megatron.get("moe_layer_freq") in (None, 1):
        yield Problem(
            _FLAG,
            f"has no effect with --recompute-modules {_MLP}: every layer has experts",
            f"use {_GRANULARITY} full, or remove it",
        )


def _enter_regions(model: Any, config: Any, vp_stage: int | None) -> None:
    """Tell linear layers which of them closes the region that is computed again."""
    from mindspeed.memory import megatron as engine
    from mindspeed.memory.plan import ATTENTION_SUBLAYER, LAYER, MLP_SUBLAYER
    from mindspeed.te import local_linears
    from mindspeed.tensor_parallel.megatron import closing_linears
    from mindspeed.tensor_parallel.regions import Region

    runtime = engine.runtime_of(model)
    if runtime is None:
        return
    closing: dict[tuple[str, str], tuple[Any, ...]] = {}
    for path, layer in engine.layers_of(model).items():
        found = closing_linears(layer)
        for part, sites in (
            (_MLP, (LAYER, MLP_SUBLAYER, _MLP)),
            ("self_attention", (ATTENTION_SUBLAYER, "self_attention")),
        ):
            closing |= {(path, site): found.get(part, ()) for site in sites}
        local_linears.convert_chunk(layer, config, vp_stage)
    runtime.region = lambda layer, site: Region(closing.get((layer, site), ()))
