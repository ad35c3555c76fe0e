"""The simulated timeline, the interpreter's event log and the virtual clock agree."""

from __future__ import annotations

import pytest

from mindspeed.moe import costs as formulas
from mindspeed.moe.request import LayerRequest, program_of
from mindspeed.moe.timeline import Rates, simulate
from mindspeed.testing.clock import Link
from tests.moe import layer_ranks, timeline_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = 20
VARIANTS = [{}, {"async_permutation": True}, {"overlap": True}]
PHASES = (formulas.FORWARD, formulas.BACKWARD)


def sizes_of(shared, **changes):
    return formulas.Sizes(
        layer_ranks.TOKENS,
        layer_ranks.HIDDEN,
        layer_ranks.EXPERTS,
        2,
        layer_ranks.FFN,
        itemsize=4,
        shared=shared,
        **changes,
    )


def simulated(sizes, request, watched):
    load = formulas.load_of(sizes, watched.choices, watched.rank)
    link = Link(timeline_ranks.BYTES, timeline_ranks.LATENCY)
    rates = Rates(timeline_ranks.FLOPS, lambda message: link.seconds(message.wire))
    costs = formulas.all_to_all(sizes, load, anchored=request.overlap)
    return simulate(program_of(request), costs, rates)


def of_phase(intervals, kind, phase):
    return [one for one in intervals if one.kind == kind and one.phase == phase]


@pytest.mark.parametrize("shared", [0, SHARED], ids=["routed", "shared"])
def test_all_to_all(ranks, shared):
    overrides = {"moe_shared_expert_intermediate_size": shared} if shared else {}
    found = ranks(2, timeline_ranks.watch, "te", {"expert": 2}, overrides, VARIANTS, setup=ADAPTOR)
    for results in found:
        for changes, watched in zip(VARIANTS, results, strict=True):
            line = simulated(sizes_of(shared, ep=2), LayerRequest(**changes), watched)
            agree(line, watched)


def agree(line, watched):
    """Events, bytes, calls, exposed seconds of both passes."""
    for phase in PHASES:
        assert list(map(str, line.log.of(phase))) == list(map(str, watched.log.of(phase)))
        sent = [
            (one.communication.op, one.communication.payload, one.communication.wire)
            for one in of_phase(watched.intervals, "communication", phase)
        ]
        assert [(m.op, m.payload, m.wire) for m in line.messages[phase]] == sent
        starts = [event.bytes for event in line.log.communications(phase)]
        assert starts == [event.bytes for event in watched.log.communications(phase)]
        waits = of_phase(watched.intervals, "wait", phase)
        assert line.exposed(phase) == pytest.approx(sum(w.seconds for w in waits), rel=1e-9)
        exposed = line.log.exposed(phase)
        assert exposed == watched.log.exposed(phase)
        assert len(of_phase(watched.hidden, "wait", phase)) == len(exposed)
    assert line.total == pytest.approx(watched.now, rel=1e-9)
