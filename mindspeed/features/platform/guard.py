"""Guards in training: ``--guard nan spike desync bitflip``.

For long trainings: values that are not finite are traced to the operator that makes them, copies of
weights on other ranks and steps computed twice are compared in bits (:mod:`mindspeed.guard`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.flags import flag
from mindspeed.ranges import POSITIVE

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_AROUND = (
    *("adaptive-memory", "automated-pipeline", "dualpipev", "dynamic-pipeline", "fold3d"),
    *("memory-fragmentation", "multiparameter-pipeline", "nanopipe", "optimized-send-recv"),
    *("pipeline-schedule", "record", "recompute-in-advance", "recompute-in-bubble"),
    *("unaligned-linear", "variable-lengths"),
)
"""Features that change the schedule of a step: the guard runs all of it again."""
KINDS = ("nan", "spike", "desync", "bitflip")


class Guard(
    Feature,
    level=0,
    page="guards.md",
    seams=("schedule", "step", "optimizer", "train"),
    planning=("no part",),
    after=_AROUND,
    excludes={
        "overlap_moe_expert_parallel_comm": "modules of two micro-batches run in parts",
        "use_megatron_fsdp": "its ranks hold no copies, and gather weights while a step runs",
        "use_torch_fsdp2": "its ranks hold no copies, and gather weights while a step runs",
    },
):
    """Names what goes wrong in training: NaN, spikes, copies that differ, flipped bits."""

    guard: tuple[str, ...] = flag((), f"what is guarded in training: {', '.join(KINDS)}")
    guard_interval: int = flag(100, "steps between two looks of desync and bitflip", range=POSITIVE)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not self.guard:
            yield Problem("--guard-interval", "guards nothing", "add --guard desync bitflip")
        unknown = [one for one in self.guard if one not in KINDS]
        if unknown:
            yield Problem("--guard", f"{unknown[0]!r} is none of {', '.join(KINDS)}")
        recipe = megatron.get("fp8_recipe") or "delayed"
        recipe = getattr(recipe, "value", recipe)
        if "bitflip" in self.guard and megatron.get("fp8") and recipe == "delayed":
            yield conflict(
                "--guard bitflip",
                "--fp8-recipe delayed",
                "its factors follow from the steps before, and a step computed again has others",
                "use tensorwise, blockwise or mxfp8, or leave out bitflip",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.guard.job import GuardOptions, TrainingGuard

        overflows = bool(megatron.get("fp16")) and not megatron.get("loss_scale")
        options = GuardOptions(
            frozenset(self.guard),
            self.guard_interval,
            megatron.get("save") or "",
            overflows,
            overflows or bool(megatron.get("max_skipped_nan_iterations")),
        )
        guard = TrainingGuard(options)
        if "nan" in self.guard:  # Megatron's check would end one rank in the middle of a step
            seams.while_training(owner=self.name, check_for_nan_in_loss_and_grad=False)
        seams.step.add(guard.around_step, owner=self.name)
        seams.schedule.add(guard.with_schedule, owner=self.name)
        seams.optimizer.add(guard.with_optimizer, owner=self.name)
