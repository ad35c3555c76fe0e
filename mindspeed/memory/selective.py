"""Modules of a layer that Megatron computes again by name: ``--recompute-modules``.

modules_of(vars(args))      # names of those that the model has: ("layernorm", "mlp")
together(("moe_act",), "moe")       # ("moe",), which contains it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Module:
    """A module of a layer.

    Attributes:
        needs: arguments of a model that has it.
        without: arguments with which it cannot be computed again, or keeps nothing.
        inside: the module that contains it.
    """

    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    inside: str = ""


MODULES: Mapping[str, Module] = {
    "core_attn": Module(without=("use_flash_attn",)),
    "layernorm": Module(),
    "mla_up_proj": Module(needs=("multi_latent_attention",)),
    "mlp": Module(),
    "moe": Module(needs=("num_experts",)),
    "moe_act": Module(needs=("num_experts", "moe_grouped_gemm"), inside="moe"),
    "shared_experts": Module(
        needs=("num_experts", "moe_shared_expert_intermediate_size"),
        without=("moe_shared_expert_overlap",),
        inside="moe",
    ),
}
"""By the name that Megatron's flag takes."""


def modules_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that the model of a job has; ``values`` are its arguments by name."""
    return tuple(
        name
        for name, one in MODULES.items()
        if all(map(values.get, one.needs)) and not any(map(values.get, one.without))
    )


def together(names: Sequence[str], more: str) -> tuple[str, ...]:
    """Modules and another one, without those that are inside of others, in their order here."""
    chosen = {*names, more}
    return tuple(
        name for name, one in MODULES.items() if name in chosen and one.inside not in chosen
    )
