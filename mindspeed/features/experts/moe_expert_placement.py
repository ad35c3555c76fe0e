"""``--moe-expert-placement FILE``: which rank holds which expert.

``mindspeed moe plan --routing DIR --placement FILE`` writes the file. Experts keep their numbers in
the router, in losses and in checkpoints, so a run goes on from any checkpoint under any placement,
with the same losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.features.experts.layer_programs import layer_problems
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-expert-placement"
_ROWS = "rows of experts are not sorted by slot there"
_NAMES = "experts are named by their slot there"


class MoeExpertPlacement(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    conflicts={
        "ampipe": _ROWS,
        "balanced-experts": _ROWS,
        "moe-allgather-overlap": _ROWS,
        "moe-alltoall-exchange": _ROWS,
        "moe-fb-overlap": _ROWS,
        "pipe-experts": _ROWS,
    },
    excludes={
        "lora_target_modules": _NAMES,
        "moe_pad_expert_input_to_capacity": _ROWS,
        "moe_shared_expert_overlap": "both decide what is computed beside the rows",
        "overlap_moe_expert_parallel_comm": _ROWS,
        "use_megatron_fsdp": _NAMES,
        "use_torch_fsdp2": _NAMES,
    },
):
    """Experts on the ranks that a file says."""

    moe_expert_placement: str = flag("", "file that says which rank holds which expert")

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if "num_experts" not in megatron:  # a framework's configuration
            return
        if not megatron["num_experts"]:
            yield Problem(NAME, "needs a mixture of experts", "add --num-experts, or remove it")
            return
        yield from layer_problems(NAME, megatron)
        if (dispatcher := megatron.get("moe_token_dispatcher_type", "alltoall")) != "alltoall":
            yield Problem(
                NAME,
                f"--moe-token-dispatcher-type is {dispatcher}, whose rows are not sorted by slot",
                "give --moe-token-dispatcher-type alltoall",
            )
        if megatron.get("moe_model_type") == "deepspeed_moe":
            yield Problem(NAME, "is for --moe-model-type megatron_moe", "remove one")
        if not (megatron.get("save") or megatron.get("load")):
            return
        if (form := megatron.get("ckpt_format") or "torch_dist") != "torch_dist":
            yield Problem(
                NAME, f"--ckpt-format {form} names slots", "give --ckpt-format torch_dist"
            )
        shares = megatron.get("use_distributed_optimizer")
        if shares and not megatron.get("dist_ckpt_optim_fully_reshardable"):
            yield Problem(
                NAME,
                "the distributed optimizer saves its states as they lie, without their experts",
                "add --dist-ckpt-optim-fully-reshardable",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.adaptor.moe import moe_layers
        from mindspeed.moe.load.megatron_placement import place
        from mindspeed.moe.load.slots import read

        ranks = megatron.get("expert_model_parallel_size") or 1
        slots = read(Path(self.moe_expert_placement), megatron["num_experts"], ranks)

        def place_chunk(model: Any, config: Any, vp_stage: int | None) -> None:
            for layer in moe_layers(model):
                place(layer, slots.of(layer.layer_number), seams.journal)

        seams.chunk.add(place_chunk, owner=self.name)
