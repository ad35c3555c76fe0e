"""Steps of models by schedules that divide backward, compared with Megatron's own schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mindspeed.pipeline.schedule.weight_gradients import WeightGradients
from tests.pipeline.schedule.step_ranks import (
    Layout,
    Model,
    Step,
    differences,
)


@dataclass(frozen=True)
class Case:
    """A model, and plans of it.

    Attributes:
        layout: of the model.
        runs: (number of micro-batches, fields of ``ScheduleRequest``).
        mtp: layers of multi-token prediction.
    """

    layout: Layout
    runs: tuple[tuple[int, dict[str, Any]], ...] = ((4, {"kind": "nanopipe"}),)
    mtp: int = 0


@dataclass(frozen=True)
class Found:
    """What one run did on this rank.

    Attributes:
        different: from Megatron's own schedule, or from what the run is to be compared with.
        deferred: weight gradients that were computed in a W.
        peak: most bytes of pending weight gradients on the device.
        copied: bytes to the host, and back.
    """

    different: list[str]
    deferred: int
    peak: int
    copied: tuple[int, int]


class DividedModel(Model):
    """A model whose layers may divide backward, in both specs, with experts and further heads."""

    def __init__(self, case: Case) -> None:
        self.case = case
        super().__init__(case.layout)
        self.store: WeightGradients = self.chunks[0].module.weight_gradients

    def _specs(self, stage: int | None) -> tuple[Any, Any]:
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_mtp_block_spec,
        )

        te = self.layout.spec == "te"
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=stage
        )
        if not self.case.mtp:
            return spec, None
        return spec, get_gpt_mtp_block_spec(self.config, spec, te, vp_stage=stage)


def compare(cases: dict[str, Case]) -> dict[str, list[Found]]:
    """Every run of every case against Megatron's schedule."""
    from mindspeed.megatron_adaptor import repatch

    repatch({"moe_grouped_gemm": True})
    found = {}
    for name, case in cases.items():
        model = DividedModel(case)
        expected = {m: model.step(m) for m, _ in case.runs}
        found[name] = [_run(model, m, expected[m], **changes)[0] for m, changes in case.runs]
    return found


def swapped(case: Case) -> tuple[Found, Found, float]:
    """A step with stashes on the host, against the same order of actions without copies.

    Returns:
        The step with copies, the one without, and how far the gradients of the first are from those
        of Megatron's schedule, relative to the largest.
    """
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan

    model, ((m, changes),) = DividedModel(case), case.runs
    request = ScheduleRequest(**changes)
    plan = build_plan(request, case.layout.pipeline, case.layout.chunks, m)
    rows = (tuple(action for action in row if action.op not in "OL") for row in plan.rows)
    megatrons = model.step(m)
    without, expected = _run(model, m, megatrons, plan=replace(plan, rows=tuple(rows)))
    found, step = _run(model, m, expected, **changes)
    distances = [
        float((step.gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in megatrons.gradients.items()
    ]
    return found, without, max(distances)


def _run(model: DividedModel, m: int, expected: Step, **changes: Any) -> tuple[Found, Step]:
    from mindspeed.pipeline.schedule.megatron import scheduled

    store, figures = model.store, model.store.swap.figures
    before = store.computed, figures.copied_out, figures.copied_in
    store.peak_bytes = 0
    step = model.step(m, scheduled(None, **changes))
    deferred, out, back = (
        now - then
        for now, then in zip(
            (store.computed, figures.copied_out, figures.copied_in), before, strict=True
        )
    )
    return Found(differences(step, expected), deferred, store.peak_bytes, (out, back)), step
