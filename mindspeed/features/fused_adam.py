"""Fused Adam: ``--optimizer fused_adam`` and ``--optimizer-selection``.

Adam and AdamW update all parameters of a group and dtype by one fused operator of torch, which has
kernels for CPU, CUDA and NPU: kernel launches of a step do not grow with the number of parameters.
Every ``--optimizer adam`` is this one; ``fused_adam`` is its name in the original library.

``--optimizer-selection`` chose between two kernels there, ``fused_adamw`` for one of its own and
``fused_torch_adamw`` for torch's. Here both are torch's, so scripts with either run unchanged.
``fused_ema_adamw`` is AdamW with an average of the weights (:mod:`mindspeed.features.ema_adamw`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


ADDED = ("fused_adam", "cadam")  # Megatron does not know them and is given adam
NAMES = ("adam", "sgd", "muon", "dist_muon", *ADDED)


@dataclass(frozen=True)
class FusedAdamOptions:
    """Names of the fused Adam."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon", "fused_adam", "cadam"] = flag(
        "adam", "the optimizer", megatron=True, adds=ADDED
    )
    optimizer_selection: Literal["fused_adamw", "fused_torch_adamw", "fused_ema_adamw"] = flag(
        "fused_adamw", "which AdamW: the first two are torch's, the third also averages weights"
    )


def chosen(megatron: Megatron) -> str:
    """The optimizer that the user chose, also after Megatron was given another name."""
    return str(megatron.get("update_rule") or megatron.get("optimizer") or "adam")


def _validate(options: FusedAdamOptions, megatron: Megatron) -> list[Problem]:
    level = megatron.get("optimization_level")
    if options.optimizer == "cadam" and level is not None and level < 2:
        return [Problem("--optimizer cadam", f"needs --optimization-level >= 2 (got {level})")]
    if options.optimizer_selection == "fused_adamw":
        return []
    if options.optimizer in ("adam", "fused_adam"):
        return []
    name = f"--optimizer-selection {options.optimizer_selection}"
    return [Problem(name, f"has no effect with --optimizer {options.optimizer}", "use adam")]


def _corrects(options: FusedAdamOptions, megatron: Megatron) -> dict[str, Any]:
    return {"optimizer": "adam"}


def _attach(seams: Seams, options: FusedAdamOptions, megatron: Megatron) -> None:
    """Nothing to attach: Megatron's Adam is the fused one of the substitute."""


FEATURE = Feature(
    name="fused-adam",
    summary="Adam as one operator per parameter group",
    level=0,
    options=FusedAdamOptions,
    enabled=lambda options, megatron: (
        options.optimizer in ADDED or options.optimizer_selection != "fused_adamw"
    ),
    validate=_validate,
    corrects=_corrects,
    attach=_attach,
)
