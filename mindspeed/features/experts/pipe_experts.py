"""``--use-pipe-experts``: local experts one by one, so that each hides the others' communication.

    --use-pipe-experts --pipe-experts-multi-data 2

The tokens of each local expert are sent separately, in several parts, while another one computes:
only the first dispatch and the last combine of a layer are not hidden.
``--pipe-experts-multi-stream``: collectives of the expert-parallel and the tensor-parallel group
take turns on the link, and both hide behind the experts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

from mindspeed.features.experts.layer_programs import (
    DEEPSPEED,
    all_to_all_problems,
    expert_problems,
    on_layers,
    rank_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME, DATA, STREAMS = (
    "--use-pipe-experts",
    "--pipe-experts-multi-data",
    "--pipe-experts-multi-stream",
)
logger = logging.getLogger(__name__)


class PipeExperts(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    excludes=dict.fromkeys(
        (
            "fp8",
            "fp4",
            "delay_wgrad_compute",
            "overlap_moe_expert_parallel_comm",
            "moe_shared_expert_overlap",
            "moe_dynamic_padding",
            "moe_router_padding_for_quantization",
        ),
        "",
    ),
    after=("moe-overlap",),
):
    """Local experts one by one, each hides the communication of the others."""

    use_pipe_experts: bool = flag(
        False, "compute local experts one by one while other experts' tokens travel"
    )
    pipe_experts_multi_data: int = flag(
        1, "parts of each expert's tokens that travel by themselves", range=Range(1, 1024)
    )
    pipe_experts_multi_stream: bool = flag(
        False, "expert-parallel and tensor-parallel collectives of the experts take turns"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not self.use_pipe_experts:
            given = STREAMS if self.pipe_experts_multi_stream else DATA
            yield Problem(given, f"is a part of {NAME}", f"add {NAME}, or remove it")
            return
        yield from expert_problems(NAME, megatron, all_to_all_problems, rank_problems, self._slices)

    def _slices(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        if self.pipe_experts_multi_stream and not megatron.get("sequence_parallel"):
            yield Problem(
                STREAMS,
                "orders the tensor-parallel collectives that sequence parallelism adds",
                "add --sequence-parallel, or remove it",
            )
        capacity = _capacity(megatron)
        if capacity is not None and self.pipe_experts_multi_data > capacity:
            yield Problem(
                f"{DATA} {self.pipe_experts_multi_data}",
                f"is more than the {capacity} rows that each expert has",
                f"choose 1 to {capacity}",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.layer.megatron import change

        def pieces(layer: Any) -> None:
            slices, chained = self.pipe_experts_multi_data, self.pipe_experts_multi_stream
            if slices == 1 and layer.num_local_experts == 1:
                _say_that_it_is_off(layer.layer_number)
            else:
                change(layer, seams.journal, pipe_slices=slices, pipe_chained=chained)

        on_layers(seams, self.name, pieces)


def _capacity(megatron: Megatron) -> int | None:
    """Tokens of an expert, if equal for all; None where they are counted."""
    length, samples = megatron.get("seq_length"), megatron.get("micro_batch_size")
    if not length or not samples:
        return None
    ranks = (megatron.get("tensor_model_parallel_size") or 1) * (
        megatron.get("context_parallel_size") or 1
    )
    tokens = length * samples // ranks
    experts, topk = megatron["num_experts"], megatron.get("moe_router_topk") or 2
    if megatron.get("moe_model_type") == DEEPSPEED:
        from mindspeed.moe.deepspeed.gate import Capacity

        if megatron.get("moe_no_drop"):
            return None
        factor = megatron.get("moe_train_capacity_factor") or 1.0
        return Capacity(factor, experts, topk)(tokens)
    factor = megatron.get("moe_expert_capacity_factor")
    if not factor or not megatron.get("moe_pad_expert_input_to_capacity"):
        return None
    return ceil(tokens * topk / experts * factor)


def _say_that_it_is_off(layer: int) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: layer %s has one expert on a rank and %s is 1, so there is nothing to compute "
            "meanwhile: the flag is off; %s 2 or more hides its communication",
            NAME,
            layer,
            DATA,
            DATA,
        )
