"""Steps in which a schedule drops and recomputes activations, inside rank processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed.instruments import saved_for_backward
from mindspeed.journal import Journal
from mindspeed.memory.figures import SiteFigures
from mindspeed.memory.scheduled import ScheduledRecomputation
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import build_plan
from tests.pipeline.schedule.step_ranks import Layout, Model, differences


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        layout: of the model.
        asked: fields of the schedule's request.
        m: micro-batches.
        layers: of each chunk that may be recomputed; None: all.
    """

    layout: Layout
    asked: dict[str, Any]
    m: int
    layers: int | None = None


@dataclass(frozen=True)
class Found:
    """What the step did.

    Attributes:
        differ: what is not as in the same step of Megatron's own interleaved schedule.
        planned: chunks that this rank was to recompute.
        early: second runs of layers that did not wait for a gradient.
        figures: of the memory engine.
        layers: of each chunk that may be recomputed.
        nbytes: that layers held at the fullest moment.
        plan: of the step.
    """

    differ: list[str]
    planned: int
    early: int
    figures: SiteFigures
    layers: int
    nbytes: int
    plan: Plan = field(repr=False)


def compare(cases: dict[str, Case]) -> dict[str, Found]:
    """Every case."""
    from mindspeed.megatron_adaptor import repatch

    repatch({"moe_grouped_gemm": True})
    return {name: _compare(case) for name, case in cases.items()}


def _compare(case: Case) -> Found:
    from megatron.core import parallel_state

    layout, m = case.layout, case.m
    model, journal = Model(layout), Journal()
    counters = _counters(model)
    before = {name: buffer.clone() for name, buffer in counters.items()}
    expected, expected_counts = model.step(m), _counted(counters, before)
    runtimes, layers = _installed(model, case.layers, journal)
    recomputations = {chunk: _Observed(runtime) for chunk, runtime in runtimes.items()}
    pipeline = _pipeline(model, case, recomputations)
    with saved_for_backward(*model.chunks) as saved:
        step = model.step(m, pipeline)
    wrong = differences(step, expected)
    counts = _counted(counters, before)
    wrong += [
        name for name, value in expected_counts.items() if not torch.equal(counts[name], value)
    ]
    if case.asked == {"recompute": "bubble"}:
        evaluation = model.step(m, pipeline, forward_only=True)
        if evaluation.losses != model.step(m, forward_only=True).losses:
            wrong.append("losses of an evaluation")
    figures = SiteFigures()
    for runtime in runtimes.values():
        figures.add(runtime.figures.total())
    plan = build_plan(pipeline.request, layout.pipeline, layout.chunks, m)
    row = plan.rows[parallel_state.get_pipeline_model_parallel_rank()]
    journal.undo()
    return Found(
        differ=wrong,
        planned=sum(action.op == "R" for action in row),
        early=sum(one.early for one in recomputations.values()),
        figures=figures,
        layers=layers,
        nbytes=sum(
            nbytes
            for module, nbytes in saved.by_module().items()
            if ".layers." in module or module == "(no module)"  # inputs of layers, in backward
        ),
        plan=plan,
    )


def _installed(model: Model, number: int | None, journal: Journal) -> tuple[dict[Any, Any], int]:
    """The runtimes of the model's chunks, and the layers of each that may be recomputed."""
    from megatron.core.utils import unwrap_model

    from mindspeed.features.memory.activation_memory import convert_linears
    from mindspeed.memory import plan as plans
    from mindspeed.memory.megatron import install, layers_of

    runtimes = {}
    for number_of_chunk, wrapped in enumerate(model.chunks):
        chunk = unwrap_model(wrapped)
        layers = list(layers_of(chunk))[:number]
        plan = plans.ChunkPlan(
            {layer: {plans.LAYER: plans.SiteAction.RECOMPUTE} for layer in layers}
        )
        runtimes[chunk] = install(chunk, plan, journal)
        if model.layout.ddp.get("overlap_grad_reduce"):
            convert_linears(chunk, model.config, number_of_chunk)
    return runtimes, len(layers)


class _Observed(ScheduledRecomputation):
    """Counts second runs.

    Attributes:
        early: those of ``R``.
    """

    early = 0

    def recompute(self, microbatch: Any) -> None:
        figures = self._runtime.figures
        before = figures.total().reruns
        super().recompute(microbatch)
        self.early += figures.total().reruns - before


def _pipeline(model: Model, case: Case, recomputations: dict[Any, Any]) -> Any:
    from mindspeed.pipeline.schedule.megatron import scheduled
    from mindspeed.te.local_linears import new_store, split

    if case.asked.get("kind") == "zb-h1":
        store = new_store()
        for number, chunk in enumerate(recomputations):
            split(store, chunk, model.config, number)
    return replace(
        scheduled(None, **{"kind": "interleaved", **case.asked}),
        recomputation=recomputations.get,
    )


def _counters(model: Model) -> dict[str, torch.Tensor]:
    """Buffers, in which routers count tokens."""
    return {
        f"{number}.{name}": buffer
        for number, chunk in enumerate(model.chunks)
        for name, buffer in chunk.named_buffers()
    }


def _counted(
    counters: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a step counted beside losses and gradients; puts everything back as it was before."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    tracker = get_moe_layer_wise_logging_tracker()
    found = {name: entry["values"].clone() for name, entry in tracker.items()}
    tracker.clear()
    for name, buffer in counters.items():
        found[name] = buffer.clone()
        buffer.copy_(before[name])
    return found
