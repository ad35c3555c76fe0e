"""What the names of a layout stand for: tables of flags, by their names in the namespace.

A flag whose value is None is taken away from the job's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.moe.comparison import ENTRIES

Flags = Mapping[str, Any]

CP_ALGORITHMS: dict[str, Flags] = {
    "ulysses": {"context_parallel_algo": "ulysses_cp_algo"},
    "ring": {"context_parallel_algo": "megatron_cp_algo"},
    "hybrid": {"context_parallel_algo": "hybrid_cp_algo"},
    "kv-allgather": {"context_parallel_algo": "kvallgather_cp_algo"},
}
"""Context parallelism; a hybrid has ``ulysses_degree_in_cp``, from its name ``hybrid:4``."""

FLASH_ATTENTION = "flash-attention"
MEMORY: dict[str, Flags] = {
    FLASH_ATTENTION: {"use_flash_attn": True},
    "swap-attention": {"swap_attention": True},
    "recompute-norm": {"recompute_norm": True},
    "recompute-activation": {"recompute_activation_function": True},
    "reuse-fp32-param": {"reuse_fp32_param": True},
    "swap-optimizer": {"swap_optimizer": True},
    "grad-reduce-in-bf16": {
        "grad_reduce_in_bf16": True,
        "accumulate_allreduce_grads_in_fp32": None,
        "release_fp32_grad": True,
    },
}
"""Features that save memory. A job that has flash attention keeps it: nothing is better without."""

OPTIMIZERS: dict[str, Flags] = {
    "replicated": {"use_distributed_optimizer": None, "zero_stage": None},
    "distributed": {"use_distributed_optimizer": True, "zero_stage": None},
    "zero2": {"use_distributed_optimizer": None, "zero_stage": 2},
    "zero3": {"use_distributed_optimizer": None, "zero_stage": 3},
}
"""What data-parallel ranks share."""


def _program(text: str, dispatcher: str) -> Flags:
    """Flags of an expert program from their text."""
    flags: dict[str, Any] = {"moe_token_dispatcher_type": dispatcher}
    words = text.split() if text.startswith("--") else []
    for position, word in enumerate(words):
        if word.startswith("--"):
            after = words[position + 1 : position + 2]
            value: Any = True if not after or after[0].startswith("--") else after[0]
            name = word[2:].replace("-", "_")
            flags[name] = int(value) if isinstance(value, str) and value.isdigit() else value
    return flags


EXPERT_PROGRAMS: dict[str, Flags] = {
    name: _program(entry.flags, entry.dispatcher) for name, entry in ENTRIES.items()
}
"""Programs of :mod:`mindspeed.moe.comparison`."""


@dataclass(frozen=True)
class Recompute:
    """What is computed again in backward.

    Attributes:
        modules: of Megatron's ``--recompute-modules``; a selective recomputation.
        layers: of every chunk, as a whole; -1: all.
    """

    modules: tuple[str, ...] = ()
    layers: int = 0

    def __post_init__(self) -> None:
        if self.modules and self.layers:
            raise ValueError("layers are recomputed as a whole or by modules, not both")

    def __str__(self) -> str:
        if self.layers:
            return "full" if self.layers < 0 else f"full:{self.layers}"
        return "+".join(self.modules) or "none"

    def overrides(self) -> Flags:
        """The flags."""
        none: dict[str, Any] = dict.fromkeys(_RECOMPUTE)
        if self.modules:
            modules = list(self.modules)
            return none | {"recompute_granularity": "selective", "recompute_modules": modules}
        if not self.layers:
            return none
        method = "uniform" if self.layers < 0 else "block"
        return none | {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": max(self.layers, 1),
        }


_RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "checkpoint_activations",
    "checkpoint_policy",
)


def algorithm_flags(name: str, cp: int) -> Flags:
    """Flags of a context-parallel algorithm; Megatron's own choice gives way to them."""
    base, _, degree = name.partition(":")
    flags = {"cp_comm_type": None, "ulysses_degree_in_cp": None, **CP_ALGORITHMS[base]}
    if degree:
        flags["ulysses_degree_in_cp"] = int(degree)
    return flags if cp > 1 else dict.fromkeys(flags)
