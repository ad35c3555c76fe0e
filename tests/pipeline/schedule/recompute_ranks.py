"""Steps in which a schedule drops and recomputes activations, inside rank processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspeed.journal import Journal
from mindspeed.memory.figures import SiteFigures
from mindspeed.pipeline.schedule.schedules import build_plan
from mindspeed.testing import saved_for_backward
from tests.pipeline.schedule.step_ranks import Layout, Model, differences


def compare(
    cases: dict[str, tuple[Layout, dict[str, Any], int, int | None]],
) -> dict[str, dict[str, Any]]:
    """Steps like Megatron's own interleaved schedule, and what they computed again.

    Args:
        cases: name -> (layout, what is asked of the schedule, number of micro-batches, layers of a
            chunk that may be recomputed; None: all).
    """
    return {name: _compare(*case) for name, case in cases.items()}


def _compare(layout: Layout, asked: dict[str, Any], m: int, number: int | None) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from mindspeed.features._activation_memory import convert_linears
    from mindspeed.memory.megatron import install, layers_of, runtime_of
    from mindspeed.memory.plan import Action, Plan
    from mindspeed.memory.scheduled import ScheduledRecomputation
    from mindspeed.pipeline.schedule.megatron import scheduled

    model, journal = Model(layout), Journal()
    expected = model.step(m)
    runtimes = []
    for number_of_chunk, wrapped in enumerate(model.chunks):
        chunk = unwrap_model(wrapped)
        layers = list(layers_of(chunk))[:number]
        plan = Plan({layer: {"layer": Action.RECOMPUTE} for layer in layers})
        runtimes.append(install(chunk, plan, journal))
        if layout.ddp.get("overlap_grad_reduce"):
            convert_linears(chunk, model.config, number_of_chunk)
    pipeline = replace(
        scheduled(None, kind="interleaved", **asked),
        recomputation=lambda chunk: ScheduledRecomputation(runtime_of(chunk)),
    )
    with saved_for_backward(*model.chunks) as saved:
        step = model.step(m, pipeline)
    figures = SiteFigures()
    for runtime in runtimes:
        figures.add(runtime.figures.total())
    plan = build_plan(pipeline.request, layout.pipeline, layout.chunks, m)
    row = plan.rows[parallel_state.get_pipeline_model_parallel_rank()]
    evaluation = model.step(m, pipeline, forward_only=True)
    wrong = differences(step, expected)
    if evaluation.losses != model.step(m, forward_only=True).losses:
        wrong.append("losses of an evaluation")
    journal.undo()
    return {
        "differ": wrong,
        "planned": sum(action.op == "R" for action in row),
        "figures": figures,
        "layers": len(layers),
        "bytes": sum(
            nbytes
            for module, nbytes in saved.by_module().items()
            if ".layers." in module or module == "(no module)"  # a layer's input, kept in backward
        ),
        "plan": plan,
    }
