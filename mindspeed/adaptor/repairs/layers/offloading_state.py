"""Defect: an evaluation leaves the offloading of activations in the middle of its list.

Where: the schedules of ``megatron.core.pipeline_parallel.schedules``. The manager of
``--fine-grained-activation-offloading`` counts the micro-batches of a step; it starts anew after a
training step, but not after an evaluation (Megatron-LM PR 3739).
Symptom: in the training step after an evaluation activations stay on the device; after one with
fewer micro-batches it ends in an AssertionError, "Chunk mismatch".
Fix: it starts anew after every step. The first training step shows it what there is to offload; an
evaluation before that step is forgotten.
Versions: 0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import repair

NEEDED_WITH = ("fine_grained_activation_offloading",)


def start_anew(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a schedule."""

    def schedule(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

        result = original(*args, **kwargs)
        if kwargs.get("forward_only"):
            manager = offload.PipelineOffloadManager.get_instance()
            (manager.reset_instance if manager._is_warmup else manager.reset)()
        return result

    return schedule


PATCHES = tuple(
    repair(
        f"megatron.core.pipeline_parallel.schedules:forward_backward_{name}",
        start_anew,
        "activations are offloaded after an evaluation, too",
        versions=">=0.16,<0.17",
    )
    for name in (
        "no_pipelining",
        "pipelining_with_interleaving",
        "pipelining_without_interleaving",
    )
)
