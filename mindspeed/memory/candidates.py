"""The plans of a layer between which the solver chooses.

What is cheap to compute again per byte it frees comes apart: norms, activation functions, core
attention; then attention and MLP as wholes, and the layer. With offloading, attention and MLP may
also wait in host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from mindspeed.memory.plan import LAYER, LayerPlan, SiteAction

KEEP_ALL: LayerPlan = {LAYER: SiteAction.KEEP}
LEAST: LayerPlan = {LAYER: SiteAction.RECOMPUTE}
"""Keeps nothing but the layer's input: training is possible with it if it is at all."""
ALL_ON_HOST: LayerPlan = {LAYER: SiteAction.OFFLOAD}
_ATTENTION, _MLP = "self_attention", "mlp"
_NORMS = ("input_layernorm", "pre_mlp_layernorm")
_INSIDE_ATTENTION = f"{_ATTENTION}.core_attention"
_INSIDE_MLP = (f"{_MLP}.activation", f"{_MLP}.experts.activation")


def plans_for(sites: Collection[str], *, offload: bool, rescue: bool) -> list[LayerPlan]:
    """Candidate plans of a layer, at most 66; the first keeps everything, the last is LEAST."""
    wholes = [SiteAction.RECOMPUTE, SiteAction.OFFLOAD] if offload else [SiteAction.RECOMPUTE]
    inside = [(site, SiteAction.RECOMPUTE_OUTPUT) for site in _INSIDE_MLP]
    attention = [(_INSIDE_ATTENTION, SiteAction.RECOMPUTE), *((_ATTENTION, one) for one in wholes)]
    mlp = [*inside, *((_MLP, one) for one in wholes)]
    norms = [[(norm, SiteAction.RECOMPUTE_OUTPUT)] for norm in _NORMS]
    choices = [_optional(options, sites) for options in (attention, mlp, *norms)]
    found = [dict(filter(None, chosen)) for chosen in itertools.product(*choices)]
    extra = [ALL_ON_HOST] if offload or rescue else []
    return [KEEP_ALL, *found[1:], *extra, LEAST]


def name_of(plan: LayerPlan) -> str:
    """``recompute mlp + recompute_output input_layernorm``."""
    return " + ".join(f"{action.value} {site}" for site, action in sorted(plan.items()))


def _optional(
    options: Iterable[tuple[str, SiteAction]], sites: Collection[str]
) -> list[tuple[str, SiteAction] | None]:
    return [None, *(option for option in options if option[0] in sites)]
