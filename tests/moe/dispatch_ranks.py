"""Several layers on the same ranks: Megatron's dispatcher first, then ours, with any router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.moe import layer_ranks


@dataclass
class Case:
    """One layer.

    Attributes:
        name: for messages.
        layout: Arguments of :func:`layer_ranks.start`.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each.
        spec: "te" or "local".
        experts: if given, the router chooses among the first experts only.
        options: of :func:`layer_ranks.run`.
    """

    name: str
    layout: dict[str, int]
    overrides: dict[str, Any]
    variants: list[dict[str, Any]]
    spec: str = "te"
    experts: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Figures:
    """How one program differs from Megatron's layer on one rank.

    Attributes:
        name: of the case.
        variant: of the program.
        output: largest absolute difference; 0 is bit for bit.
        gradients: largest difference as a share of the largest gradient, over all tensors.
        exposed: collectives that nothing hides, forward and backward.
        collectives: forward and backward.
        order: the events of forward and of backward.
        sent: operation and bytes that the rank sends, of every call in forward and in backward.
    """

    name: str
    variant: dict[str, Any]
    output: float
    gradients: float
    exposed: tuple[int, int]
    collectives: tuple[int, int]
    order: tuple[str, str]
    sent: tuple[list[tuple[str, int]], list[tuple[str, int]]]


def compare_all(cases: list[Case]) -> list[Figures]:
    """All cases one after the other."""
    return [figures for case in cases for figures in _compare(case)]


def _compare(case: Case) -> list[Figures]:
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change
    from mindspeed.testing import CommLedger

    layer = built(case)
    expected = layer_ranks.run(layer, **case.options)
    found = []
    for variant in case.variants:
        journal = Journal()
        change(layer, journal, **variant)
        log = layer.forward.log = EventLog()
        with CommLedger() as ledger:
            result = layer_ranks.run(layer, **case.options)
        journal.undo()
        assert result.gradients.keys() == expected.gradients.keys(), case.name
        assert result.output.dtype == expected.output.dtype
        found.append(
            Figures(
                case.name,
                variant,
                _difference(result.output, expected.output),
                max(
                    _difference(result.gradients[name], grad) / (float(grad.abs().max()) or 1.0)
                    for name, grad in expected.gradients.items()
                ),
                (len(log.exposed("forward")), len(log.exposed("backward"))),
                (len(log.communications("forward")), len(log.communications("backward"))),
                (" ".join(map(str, log.of("forward"))), " ".join(map(str, log.of("backward")))),
                (_sent(ledger, "forward"), _sent(ledger, "backward")),
            )
        )
    return found


def built(case: Case) -> Any:
    """The layer of a case, in its own groups."""
    layout = case.layout
    layer_ranks.start(**layout)
    parallel = {
        "expert_model_parallel_size": layout.get("expert", 1),
        "tensor_model_parallel_size": layout.get("tensor", 1),
        "expert_tensor_parallel_size": layout.get("expert_tensor", 1),
        "sequence_parallel": layout.get("tensor", 1) > 1,
    }
    layer = layer_ranks.layer_of(case.spec, **parallel, **case.overrides)
    if case.experts is not None:
        layer.route = _among_the_first(layer, case.experts)  # an attribute of the instance
    return layer


def _sent(ledger: Any, phase: str) -> list[tuple[str, int]]:
    return [(one.op, one.wire) for one in ledger.select(phase=phase)]


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0


def _among_the_first(layer: Any, experts: int) -> Any:
    router = layer.router

    def route(hidden: torch.Tensor, padding_mask: Any = None) -> Any:
        logits = router.gating(hidden)
        away = torch.zeros(logits.shape[-1], dtype=logits.dtype)
        away[experts:] = 1e4
        return router.routing(logits - away)

    return route
