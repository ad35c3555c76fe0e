"""Micro-batches of different lengths: ``--variable-seq-lengths``.

A micro-batch is as long as its longest sample, not ``--seq-length``: samples end with the last
token that is trained in one of them. Losses and gradients of a causal model stay the same.
Between pipeline stages a micro-batch costs 3 messages, its shape, activations and gradients, and 2
where every stage reads the data, as in our own trainer; Megatron's communicator takes 4.
"""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

logger = logging.getLogger("mindspeed")


class VariableLengths(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("batch", "schedule"),
    excludes={"hybrid_context_parallel": "it gives each sample its own ranks"},
):
    """Micro-batches as long as their longest sample, through the pipeline."""

    variable_seq_lengths: bool = flag(
        False, "a micro-batch is as long as its longest sample, not --seq-length"
    )

    def problems(self, megatron: Megatron) -> list[Problem]:
        name, problems = "--variable-seq-lengths", []
        if megatron.get("moe_token_dispatcher_type") == "allgather" and megatron.get("num_experts"):
            problems.append(
                Problem(
                    name,
                    "needs --moe-token-dispatcher-type alltoall",
                    "allgather takes equal lengths",
                )
            )
        return problems

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """Set a dispatcher, which Megatron also checks in models without experts."""
        if megatron.get("moe_token_dispatcher_type") == "allgather":
            return {"moe_token_dispatcher_type": "alltoall"}
        return {}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        stages = megatron.get("pipeline_model_parallel_size") or 1
        if stages == 1 and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "--variable-seq-lengths: there is one pipeline stage, so no lengths are exchanged; "
                "micro-batches are only truncated after their last trained token"
            )
        multiple = multiple_of(megatron)

        def trimmed(batch: dict[str, Any]) -> dict[str, Any]:
            from mindspeed.adaptor.micro_batch import trim_untrained_tail

            return trim_untrained_tail(batch, multiple)

        def schedule(forward_backward: Any) -> Any:
            from mindspeed.pipeline.megatron_lengths import with_lengths
            from mindspeed.pipeline.schedule.megatron import ScheduledPipeline

            if isinstance(forward_backward, ScheduledPipeline):
                return forward_backward  # which knows it from the model's configuration
            return with_lengths(forward_backward)

        seams.batch.add(trimmed, owner=self.name)
        seams.schedule.add(schedule, owner=self.name)


def multiple_of(megatron: Megatron) -> int:
    """Divisor that lengths must have to be sharded."""
    tensor = megatron.get("tensor_model_parallel_size") or 1
    context = megatron.get("context_parallel_size") or 1
    return math.lcm(
        megatron.get("pad_to_multiple_of") or 1,
        (tensor if megatron.get("sequence_parallel") else 1) * context,
        2 * context if context > 1 else 1,
    )
