"""Layers that compute nothing, to balance pipeline stages: ``--noop-layers 0,5``.

Indices count from 0 over ``--num-layers``, which includes the no-op layers. The model is the one
without these layers: same losses, same initialisation, same checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class NoopLayers(
    Feature,
    level=0,
    megatron_versions=">=0.15",
    seams=("layer_spec", "computing_layers"),
    excludes=dict.fromkeys(
        ("is_hybrid_model", "use_legacy_models", "overlap_moe_expert_parallel_comm"), ""
    ),
):
    """Layers that compute nothing, to balance pipeline stages."""

    noop_layers: tuple[int, ...] = flag(
        (), "indices of layers that compute nothing, from 0", range=Range(0, 100_000)
    )

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self.noop_layers)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        from mindspeed.pipeline.noop_layers import problem_of

        num_layers = megatron.get("num_layers")
        if num_layers is None:  # frameworks give it to the model only; it is checked there again
            return
        if problem := problem_of(self.noop_layers, num_layers):
            yield Problem("--noop-layers", problem)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.pipeline.noop_layers import without_noop

        noop_layers = self.noop_layers

        def replace_specs(block: Any, config: Any, first_layer: int) -> Any:
            from mindspeed.pipeline.megatron import with_noop_layers

            return with_noop_layers(block, config, first_layer, noop_layers)

        seams.layer_spec.add(replace_specs, owner=self.name)
        seams.computing_layers.add(
            lambda layers: without_noop(layers, noop_layers), owner=self.name
        )

    @classmethod
    def recorded(cls, megatron: Megatron) -> dict[str, Any]:
        """No-op layers leave no trace in a checkpoint."""
        from mindspeed.pipeline.noop_layers import indices_of, without_noop
        from mindspeed.profiling.model_flops import moe_pattern

        noop_layers = indices_of(megatron.get("noop_layers"))
        if not noop_layers:
            return {}
        values = {"num_layers": megatron["num_layers"] - len(noop_layers), "noop_layers": ()}
        if megatron.get("num_experts"):
            pattern = [int(expert) for expert in moe_pattern(megatron)]
            values["moe_layer_freq"] = without_noop(pattern, noop_layers)
        return values

    @classmethod
    def restored(cls, recorded: Megatron, megatron: Megatron) -> dict[str, Any]:
        """Those of the run stay; a pattern of layers goes around them."""
        from mindspeed.pipeline.noop_layers import indices_of, with_noop

        noop_layers = indices_of(megatron.get("noop_layers"))
        if not noop_layers:
            return {}
        values = {"num_layers": recorded["num_layers"] + len(noop_layers)}
        if isinstance(pattern := recorded.get("moe_layer_freq"), list):
            values["moe_layer_freq"] = with_noop(pattern, noop_layers)
        return values
