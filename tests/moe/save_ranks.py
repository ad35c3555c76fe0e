"""Mixture-of-experts layers under save policies: what they keep, and whether a bit differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.moe import layer_ranks
from tests.moe.dispatch_ranks import Case, built


@dataclass
class Compared:
    """One policy beside the program that keeps everything, on one rank.

    Attributes:
        name: of the case.
        policy: fields of ``LayerRequest``.
        different: outputs and gradients that are not equal bit for bit.
        collectives: of forward and of backward.
        order: the events of backward.
        sent: bytes of every all-to-all, in forward and in backward.
    """

    name: str
    policy: dict[str, Any]
    different: list[str]
    collectives: tuple[int, int]
    order: str
    sent: tuple[list[int], list[int]]


def compare_policies(cases: Sequence[Case], policies: Sequence[dict[str, Any]]) -> list[Compared]:
    """All policies of all cases; the first variant of a case is its program."""
    return [found for case in cases for found in _compare(case, policies)]


def _compare(case: Case, policies: Sequence[dict[str, Any]]) -> list[Compared]:
    import re

    layer, options = built(case), dict(case.options)
    frozen = options.pop("frozen", None)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not frozen or re.search(frozen, name) is None)
    expected, _, _ = _run(layer, case.variants[0], options)
    found = []
    for policy in policies:
        result, log, ledger = _run(layer, case.variants[0] | policy, options)
        assert result.gradients.keys() == expected.gradients.keys(), case.name
        pairs = {"output": (result.output, expected.output)} | {
            name: (result.gradients[name], grad) for name, grad in expected.gradients.items()
        }
        found.append(
            Compared(
                case.name,
                policy,
                [name for name, (one, other) in pairs.items() if not one.equal(other)],
                (len(log.communications("forward")), len(log.communications("backward"))),
                " ".join(map(str, log.of("backward"))),
                (_sent(ledger, "forward"), _sent(ledger, "backward")),
            )
        )
    return found


def _sent(ledger: Any, phase: str) -> list[int]:
    return [one.wire for one in ledger.select(phase=phase) if one.op == "all_to_all"]


def _run(layer: Any, fields: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    from mindspeed.instruments import CommLedger
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change
    from tests.moe.dispatch_ranks import _nodes

    journal, log = Journal(), EventLog()
    change(layer, journal, **fields, **_nodes(layer, fields))
    layer.forward.log = log
    with CommLedger() as ledger:
        result = layer_ranks.run(layer, **options)
    journal.undo()
    return result, log, ledger


def saved_bytes(
    spec: str,
    layout: dict[str, int],
    overrides: dict[str, Any],
    variants: Sequence[dict[str, Any] | None],
    tokens: int,
) -> tuple[list[int], list[list[str]]]:
    """Unique bytes kept beside parameters and the layer's input, and the events of each variant.

    Args:
        spec: "te" or "local".
        layout: Arguments of ``layer_ranks.start``.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each; None: Megatron's own forward.
        tokens: Of each rank.
    """
    import torch.distributed as dist

    from mindspeed.instruments.saved import saved_for_backward
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change

    layer_ranks.start(**layout)
    layer = layer_ranks.layer_of(spec, **layer_ranks.parallel_of(layout), **overrides)
    width = layer.config.hidden_size
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x = torch.randn(tokens, 1, width, generator=generator).requires_grad_()
    kept, events = [], []
    for changes in variants:
        journal, log = Journal(), EventLog()
        if changes is not None:
            change(layer, journal, **changes)
            layer.forward.log = log
        with saved_for_backward(layer) as saved:
            output, _ = layer(x)
            kept.append(saved.live_bytes - x.nbytes)
            output.sum().backward()
            assert saved.live_bytes == 0, (changes, saved.by_site())
        events.append([str(event) for event in log.of("backward")])
        journal.undo()
    return kept, events


def first_layers(stage: int, chunks: int, numbers: Sequence[int]) -> list[list[int]]:
    """Which layers of a chunk count as first, for numbers of layers of a pipeline stage."""
    from types import SimpleNamespace

    from mindspeed.features.experts.layer_programs import chunk_policies
    from tests.support import gpt_ranks

    layer_ranks.start()
    model = gpt_ranks.build(gpt_ranks.config("moe-grouped"), "te")
    config = SimpleNamespace(
        virtual_pipeline_model_parallel_size=chunks,
        recompute_granularity=None,
        recompute_num_layers=None,
    )
    return [
        [i for i, (_, first) in enumerate(chunk_policies(model, config, stage, number)) if first]
        for number in numbers
    ]
