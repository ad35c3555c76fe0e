"""Steps with micro-batches of different sizes, and the same samples in equal ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.pipeline.schedule.step_ranks import Layout, Model, Step, forward_step

MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1.0,
    "moe_z_loss_coeff": 0.1,
}


@dataclass(frozen=True)
class Case:
    """A model, the schedule that trains it with ``sizes``, and the form of its loss."""

    layout: Layout
    sizes: tuple[int, ...]
    kind: str = "1f1b"
    loss: str = "mean"


def compare(cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    """Largest relative differences of losses and gradients for each case."""
    return {name: _compare(case) for name, case in cases.items()}


def _compare(case: Case) -> dict[str, float]:
    from mindspeed.pipeline.schedule.megatron import scheduled
    from mindspeed.te.local_linears import new_store, split

    model, m = Model(case.layout), len(case.sizes)
    if case.kind == "zb-h1":
        store = new_store()
        for chunk in model.chunks:
            split(store, chunk.module, model.config, None)
    reports: list[list[Any]] = []

    def step(schedule: Any = None) -> Step:
        inner = schedule or _megatrons()

        def run(**arguments: Any) -> Any:
            arguments["forward_step_func"] = _forward_step(case.loss)
            reports.append(inner(**arguments))
            return []

        return model.step(m, run)

    expected, dynamic = step(), step(scheduled(None, kind=case.kind, sizes=case.sizes))
    differences = {"gradients": _difference(dynamic.gradients, expected.gradients)}
    one, other = map(_mean_report, reports)
    differences["losses"] = abs(one - other) / abs(one or 1)
    evaluated = [
        model.step(m, schedule, forward_only=True).losses
        for schedule in (None, scheduled(None, kind=case.kind, sizes=case.sizes))
    ]
    differences["evaluation"] = float(evaluated[0] != evaluated[1])
    return differences


def _megatrons() -> Any:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    return get_forward_backward_func()


def _forward_step(loss: str) -> Any:
    def step(reader: Any, model: Any) -> tuple[Any, Any]:
        output, _ = forward_step(reader, model)
        return output, partial(_LOSSES[loss])

    return step


def _mean(output: torch.Tensor) -> tuple[Any, ...]:
    loss = output.mean()
    return loss, {"lm loss": loss.detach().clone()}


def _sum(output: torch.Tensor) -> tuple[Any, ...]:
    loss, count = output.sum(), torch.tensor(output.numel(), dtype=torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


_LOSSES = {"mean": _mean, "sum": _sum}


def _mean_report(reports: list[dict[str, torch.Tensor]]) -> float:
    """As Megatron-LM averages reports over the micro-batches of a step."""
    if not reports:
        return 0.0
    values = torch.stack([report["lm loss"].view(-1) for report in reports]).double()
    return float(values.mean() if values.shape[1] == 1 else values[:, 0].sum() / values[:, 1].sum())


def _difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(
        float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-30))
        for name, gradient in expected.items()
    )
