"""Requirements and attachment of features that build on Megatron's precision-aware optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from mindspeed.features.feature import Megatron, Problem, conflict

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

SEAMS = ("optimizer_args", "optimizer")
_ADAM = ("adam", "fused_adam")
# Flag that excludes them -> why, and what to use.
_EXCLUDED = {
    "use_megatron_fsdp": (
        "--use-megatron-fsdp (--zero-stage 2 and 3)",
        "Megatron-FSDP keeps the fp32 weights itself",
        "use --zero-stage 1 (--use-distributed-optimizer), or drop one",
    ),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "it keeps the fp32 weights itself", "drop one"),
    "optimizer_cpu_offload": (
        "--optimizer-cpu-offload",
        "another optimizer keeps the states, on the host",
        "drop one",
    ),
    "lora_target_modules": (
        "--lora-target-modules",
        "adapters are fp32, and the 16-bit weights are not trained",
        "drop one",
    ),
    "lora_load": (
        "--lora-load",
        "adapters are fp32, and the 16-bit weights are not trained",
        "drop one",
    ),
}


def problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find conflicts with ``flag``, which requires 16-bit parameters and ``FusedAdam``."""
    if (optimizer := megatron.get("optimizer", "adam")) not in _ADAM:
        yield conflict(flag, f"--optimizer {optimizer}", fix="use adam")
    for name, (other, why, fix) in _EXCLUDED.items():
        if megatron.get(name):
            yield conflict(flag, other, why, fix)
    if megatron.get("fp8_param_gather"):
        yield conflict(flag, "--fp8-param-gather", "weights are fp8", "drop one")


def is_narrow(megatron: Megatron) -> bool:
    """Whether the model has 16-bit parameters; True if a framework leaves it undefined."""
    return bool(megatron.get("fp16") or megatron.get("bf16", True))


def attach(seams: Seams, owner: str, *, remainders: bool = False) -> None:
    """Let ``FusedAdam`` keep the master weights and read gradients where they are.

    Args:
        seams: the seams of :data:`SEAMS`.
        owner: the feature.
        remainders: master weights are stored as what the bf16 parameters lack.
    """
    from mindspeed.optimizer import megatron as optimizers
    from mindspeed.te import optimizer_policy

    optimizer_policy.check_in_use(owner)
    change = partial(optimizers.precision_aware, remainders=remainders)
    seams.optimizer_args.add(change, owner=owner)
    seams.optimizer.add(optimizers.masters_inside, owner=owner)
    seams.optimizer.add(optimizers.narrow_gradients, owner=owner)
