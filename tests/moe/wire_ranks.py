"""Layers whose rows travel in eight bits, beside the same program on rows that were rounded so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.moe.wire import dequantize, quantize
from tests.moe import layer_ranks
from tests.moe.dispatch_ranks import Case, _nodes, built


@dataclass
class Compared:
    """One layer on one rank.

    Attributes:
        name: of the case.
        different: outputs and gradients that are not equal bit for bit.
        changed: those that are not what they are without eight bits.
        sent: bytes of the exchanges, in forward and in backward, in eight bits and without.
    """

    name: str
    different: list[str]
    changed: list[str]
    sent: tuple[dict[str, list[int]], dict[str, list[int]]]


def compare(cases: Sequence[Case], fp8: str) -> list[Compared]:
    """All cases; the first variant of each is its program."""
    found = []
    for case in cases:
        layer, fields = built(case), case.variants[0]
        ours, sent = _run(layer, fields | {"fp8": fp8}, case.options)
        rounded, _ = _run(layer, fields, case.options, fp8)
        plain, without = _run(layer, fields, case.options)
        assert ours.keys() == rounded.keys() == plain.keys()
        different = [name for name, x in ours.items() if not x.equal(rounded[name])]
        changed = [name for name, x in ours.items() if not x.equal(plain[name])]
        found.append(Compared(case.name, different, changed, (sent, without)))
    return found


def _run(
    layer: Any, fields: dict[str, Any], options: dict[str, Any], rounded: str = ""
) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """Outputs and gradients, and bytes sent; ``rounded``: tokens, or gradients, too, before."""
    from mindspeed.instruments import CommLedger
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.call import LayerCall
    from mindspeed.moe.layer.megatron import change

    journal = Journal()
    change(layer, journal, **fields, **_nodes(layer, fields))
    if rounded:
        _round(journal, LayerCall, rounded)
    with CommLedger() as ledger:
        result = layer_ranks.run(layer, **options)
    journal.undo()
    sent: dict[str, list[int]] = {"forward": [], "backward": []}
    for event in ledger.events:
        sent[event.phase].append(event.wire)
    return {"output": result.output, **result.gradients}, sent


def _round(journal: Any, call: Any, rounded: str) -> None:
    inner_tokens, stages_of = call.to_experts, call.stages

    def to_experts(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(inner_tokens(self, hidden), True, False)

    def stages(self: Any, dispatcher: Any) -> Any:
        found = stages_of(self, dispatcher)
        last = "unpermute" if "unpermute" in found.compute else "finish"
        inner = found.compute[last]

        def compute(chunk: Any) -> None:
            chunk.tensors["rows"] = _Rounded.apply(chunk.tensors["rows"], False, True)
            inner(chunk)

        found.compute[last] = compute
        return found

    journal.set(call, "to_experts", to_experts, owner="test")
    if rounded == "both":
        journal.set(call, "stages", stages, owner="test")


class _Rounded(torch.autograd.Function):
    """Rows, or their gradients, as they arrive in eight bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: bool, backward: bool) -> torch.Tensor:
        ctx.backward = backward
        return _as_sent(x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _as_sent(grads[0]) if ctx.backward else grads[0], None, None


def _as_sent(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return dequantize(quantize(rows), x.shape[-1], x.dtype).view(x.shape)


def in_chunks(fp8: str) -> list[str]:
    """What differs in Ampipe, like :func:`compare`, and ``same`` if eight bits change nothing."""
    from mindspeed.journal import Journal
    from mindspeed.moe.ampipe.megatron import attach
    from mindspeed.moe.layer.call import LayerCall
    from mindspeed.moe.layer.megatron import change
    from tests.moe import ampipe_ranks

    ampipe_ranks.HIDDEN = layer_ranks.HIDDEN = 128
    layer_ranks.start(expert=2)
    layer = ampipe_ranks.transformer_layer("te", expert_model_parallel_size=2)
    found = []
    for fields, rounded in (({"fp8": fp8}, ""), ({}, fp8), ({}, "")):
        journal = Journal()
        change(layer.mlp, journal, **fields)
        attach(layer, 2, journal)
        if rounded:
            _round(journal, LayerCall, rounded)
        result = ampipe_ranks.run(layer)
        found.append({"output": result.output, **result.gradients})
        journal.undo()
    ours, other, plain = found
    different = [name for name, x in ours.items() if not x.equal(other[name])]
    return different + ["same"] * ours["input"].equal(plain["input"])
