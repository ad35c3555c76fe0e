"""Defect: the printed memory estimate of a model with experts is wrong.

Where: ``megatron.training.theoretical_memory_usage.report_theoretical_memory``. Weights and states
of experts are counted as if every rank had all of them, divided by the tensor-parallel size
(Megatron-LM PR 4687), and latent experts as wide as the others (PR 5145).
Symptom: "Theoretical memory footprints" after the first report of a run is up to the
expert-parallel size too large, or as many times too small as experts are sharded less.
Fix: it is not printed for these models; ``mindspeed plan --check`` counts every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind


def not_of_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``report_theoretical_memory``, which rank 0 calls."""

    def report_theoretical_memory(*args: Any, **kwargs: Any) -> Any:
        if not has_unknown_experts(vars(bind(original, args, kwargs)["args"])):
            return original(*args, **kwargs)
        print(
            "Theoretical memory footprints: Megatron's formula does not know how these experts "
            "are sharded; mindspeed plan --check counts the memory of every rank"
        )
        return None

    return report_theoretical_memory


def has_unknown_experts(megatron: Mapping[str, Any]) -> bool:
    """Whether a model has experts that Megatron's formula of memory counts wrongly.

    Args:
        megatron: Megatron's arguments.
    """
    tensor = megatron.get("tensor_model_parallel_size") or 1
    return bool(megatron.get("num_experts")) and (
        (megatron.get("expert_model_parallel_size") or 1) > 1
        or (megatron.get("expert_tensor_parallel_size") or tensor) != tensor
        or bool(megatron.get("moe_latent_size"))
    )


needed = has_unknown_experts


PATCHES = (
    repair(
        "megatron.training.theoretical_memory_usage:report_theoretical_memory",
        not_of_experts,
        "a memory estimate that is wrong is not printed",
        expects="(args, num_microbatches, verbose)",
    ),
)
