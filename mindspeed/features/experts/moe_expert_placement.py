"""``--moe-expert-placement FILE``: which rank holds which expert; ``--moe-exchange-interval``.

``mindspeed moe plan --routing DIR --placement FILE`` writes the file. Experts keep their numbers in
the router, in losses and in checkpoints, so a run goes on from any checkpoint under any placement,
with the same losses. With an interval experts are exchanged in the run, by the rows of its steps
(:mod:`mindspeed.moe.load.megatron_exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    all_to_all_problems,
    expert_problems,
    gate_problems,
    layer_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.flags import flag
from mindspeed.ranges import NOT_NEGATIVE

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-expert-placement"
INTERVAL = "--moe-exchange-interval"
_ROWS = "rows of experts are not sorted by slot there"
_NAMES = "experts are named by their slot there"


class MoeExpertPlacement(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk", "optimizer", "step", "log"),
    conflicts={
        "ampipe": _ROWS,
        "balanced-experts": _ROWS,
        "moe-allgather-overlap": _ROWS,
        "moe-alltoall-exchange": _ROWS,
        "moe-device-bound": _ROWS,
        "moe-fb-overlap": _ROWS,
        "pipe-experts": _ROWS,
    },
    excludes={
        "fp8_param_gather": "weights are exchanged in the dtype of parameters",
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
    moe_exchange_interval: int = flag(
        0,
        "iterations after which experts are exchanged if ranks were uneven, 0: never",
        range=NOT_NEGATIVE,
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name = NAME if self.moe_expert_placement else INTERVAL
        yield from expert_problems(
            name, megatron, layer_problems, all_to_all_problems, gate_problems, self._states
        )

    def _states(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        if self.moe_exchange_interval and (
            (megatron.get("num_distributed_optimizer_instances") or 1) > 1
        ):
            yield conflict(INTERVAL, "--num-distributed-optimizer-instances", "states are copied")
        if not (megatron.get("save") or megatron.get("load")):
            return
        if (form := megatron.get("ckpt_format") or "torch_dist") != "torch_dist":
            yield Problem(
                NAME, f"--ckpt-format {form} names slots", "give --ckpt-format torch_dist"
            )
        shares = megatron.get("use_distributed_optimizer")
        if shares and not megatron.get("dist_ckpt_optim_fully_reshardable"):
            yield Problem(
                name,
                "the distributed optimizer saves its states as they lie, without their experts",
                "add --dist-ckpt-optim-fully-reshardable",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.load.megatron_exchange import Exchanger
        from mindspeed.moe.load.slots import ExpertSlots, read

        ranks, experts = megatron.get("expert_model_parallel_size") or 1, megatron["num_experts"]
        slots = ExpertSlots("", experts, ranks, {})
        if self.moe_expert_placement:
            slots = read(Path(self.moe_expert_placement), experts, ranks)
        exchanger = Exchanger(slots.of, experts, self.moe_exchange_interval, seams.journal)
        seams.chunk.add(exchanger.chunk, owner=self.name)
        if self.moe_exchange_interval:
            seams.optimizer.add(exchanger.optimizer, owner=self.name)
            seams.step.add(exchanger.step, owner=self.name)
            seams.log.add(exchanger.text, owner=self.name)
