"""``--recompute-norm``: the outputs of a layer's two norms are computed again in backward.

A norm keeps its input, which the residual connection needs anyway, and the linear layer after it
keeps the norm's output for its weight gradient. The output is dropped and computed again from the
input: ``2 x 2 s b h / t`` bytes less for each layer (``t``: tensor-parallel size with sequence
parallelism, else 1) for two norms more in backward. Both layer specs, also where norm and linear
layer are one module, latent attention and multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed.features._activation_memory import (
    attach_recomputed_outputs,
    common_problems,
    layer_count_problems,
    selective_problem,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NORMS = ("input_layernorm", "pre_mlp_layernorm")


@dataclass(frozen=True)
class RecomputeNormOptions:
    """Which norms are computed again."""

    recompute_norm: bool = flag(False, "compute the outputs of a layer's norms again in backward")
    recompute_norm_num_layers: int | None = flag(
        None,
        "only in this many layers of every model chunk, after those recomputed as a whole",
        range=Range(1, 100_000),
    )


def _validate(options: RecomputeNormOptions, megatron: Megatron) -> list[Problem]:
    name, wanted = "--recompute-norm", options.recompute_norm
    number = options.recompute_norm_num_layers
    problems = list(
        layer_count_problems(name, "--recompute-norm-num-layers", wanted, number, megatron)
    )
    if wanted:
        problems += common_problems(name, megatron)
        problems += selective_problem(name, "layernorm", megatron)
    return problems


def _attach(seams: Seams, options: RecomputeNormOptions, megatron: Megatron) -> None:
    def norms(sites: Iterable[str]) -> tuple[str, ...]:
        return tuple(norm for norm in NORMS if norm in sites)

    number = options.recompute_norm_num_layers
    attach_recomputed_outputs(seams, FEATURE.name, "--recompute-norm", megatron, number, norms)


FEATURE = Feature(
    name="recompute-norm",
    summary="the outputs of norms are computed again in backward",
    level=2,
    options=RecomputeNormOptions,
    enabled=lambda o, megatron: o.recompute_norm or o.recompute_norm_num_layers is not None,
    validate=_validate,
    attach=_attach,
    seams=("chunk",),
)
