"""``--recompute-activation-function``: the output of the MLP's activation is computed again.

``linear_fc1`` keeps its output for the activation's gradient and ``linear_fc2`` keeps the
activation's output for its weight gradient. The latter is dropped and computed again from the
former: ``2 s b F / t`` bytes less for each layer with a fused activation, twice that with a gated
one that is not fused, for one element-wise operator more in backward. Dense layers, grouped and
sequential experts, shared experts; both layer specs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Option, Problem
from mindspeed.features.memory.activation_memory import (
    EXCLUDES,
    attach_recomputed_outputs,
    layer_count_problems,
    selective_problem,
)
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class RecomputeActivationFunction(
    Feature,
    level=2,
    seams=("chunk",),
    excludes={
        **EXCLUDES,
        "moe_shared_expert_overlap": "it computes the shared experts in parts",
    },
    first_layers="recompute_activation_function_num_layers",
    options=(
        Option(
            "memory",
            "recompute-activation",
            {"recompute_activation_function": True},
            "activation functions are computed again",
        ),
    ),
):
    """The output of the MLP's activation function is computed again in backward."""

    recompute_activation_function: bool = flag(
        False, "compute the output of the MLP's activation function again in backward"
    )
    recompute_activation_function_num_layers: int | None = flag(
        None,
        "only in this many layers of every model chunk, after those recomputed as a whole",
        range=Range(1, 100_000),
    )

    def enabled(self, megatron: Megatron) -> bool:
        return (
            self.recompute_activation_function
            or self.recompute_activation_function_num_layers is not None
        )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name, wanted = "--recompute-activation-function", self.recompute_activation_function
        number = self.recompute_activation_function_num_layers
        yield from layer_count_problems(name, f"{name}-num-layers", wanted, number, megatron)
        if not wanted:
            return
        for module in ("mlp", "moe", "moe_act"):
            yield from selective_problem(name, module, megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        def activations(sites: Iterable[str]) -> tuple[str, ...]:
            return tuple(site for site in sites if site.endswith(".activation"))

        number = self.recompute_activation_function_num_layers
        attach_recomputed_outputs(
            seams, self.name, "--recompute-activation-function", megatron, number, activations
        )
