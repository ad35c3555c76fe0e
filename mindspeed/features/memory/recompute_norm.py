"""``--recompute-norm``: the outputs of a layer's two norms are computed again in backward.

A norm keeps its input, which the residual connection needs anyway, and the linear layer after it
keeps the norm's output for its weight gradient. The output is dropped and computed again from the
input: ``2 x 2 s b h / t`` bytes less for each layer (``t``: tensor-parallel size with sequence
parallelism, else 1) for two norms more in backward. Both layer specs, also where norm and linear
layer are one module, latent attention and multi-token prediction.
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

NORMS = ("input_layernorm", "pre_mlp_layernorm")


class RecomputeNorm(
    Feature,
    level=2,
    seams=("chunk",),
    excludes=EXCLUDES,
    first_layers="recompute_norm_num_layers",
    options=(
        Option("memory", "recompute-norm", {"recompute_norm": True}, "norms are computed again"),
    ),
):
    """The outputs of norms are computed again in backward."""

    recompute_norm: bool = flag(False, "compute the outputs of a layer's norms again in backward")
    recompute_norm_num_layers: int | None = flag(
        None,
        "only in this many layers of every model chunk, after those recomputed as a whole",
        range=Range(1, 100_000),
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.recompute_norm or self.recompute_norm_num_layers is not None

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name, wanted = "--recompute-norm", self.recompute_norm
        number = self.recompute_norm_num_layers
        yield from layer_count_problems(
            name, "--recompute-norm-num-layers", wanted, number, megatron
        )
        if wanted:
            yield from selective_problem(name, "layernorm", megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        def norms(sites: Iterable[str]) -> tuple[str, ...]:
            return tuple(norm for norm in NORMS if norm in sites)

        number = self.recompute_norm_num_layers
        attach_recomputed_outputs(seams, self.name, "--recompute-norm", megatron, number, norms)
