"""The simulated timeline, the interpreter's event log and the virtual clock agree.

The layer runs on gloo ranks; the formulas get the routing that its router has chosen.
"""

from __future__ import annotations

import pytest

from mindspeed.moe import costs as formulas
from mindspeed.moe.dispatch.choice import choice_of
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.sizes import Sizes, load_of
from mindspeed.moe.timeline import Rates, simulate
from mindspeed.testing.clock import Link
from tests.moe import layer_ranks, timeline_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
VARIANTS = [{}, {"async_permutation": True}, {"overlap": True}]
LINK = Link(timeline_ranks.BYTES, timeline_ranks.LATENCY)
RATES = Rates(timeline_ranks.FLOPS, lambda message: LINK.seconds(message.wire))
PHASES = (formulas.FORWARD, formulas.BACKWARD)
SHARED = 20
COSTS = {"alltoall": formulas.all_to_all, "allgather": formulas.all_gather}
# (dispatcher, shared width) -> exposed collectives (forward, backward) of the variants
EXPOSED = {
    ("alltoall", 0): [(3, 2), (2, 2), (2, 1)],
    ("alltoall", SHARED): [(3, 2), (2, 2), (0, 0)],
    ("allgather", 0): [(4, 3), (2, 3), (2, 1)],
    ("allgather", SHARED): [(4, 3), (2, 3), (0, 0)],
}


@pytest.mark.parametrize(("dispatcher", "shared"), EXPOSED)
def test_one_expert_group(ranks, dispatcher, shared):
    compare(ranks, 2, dispatcher, {"expert": 2}, shared, EXPOSED[dispatcher, shared])


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", COSTS)
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "expert": 2, "expert_tensor": 2},
        {"tensor": 2, "expert": 4, "expert_tensor": 1},
        {"tensor": 2, "expert": 1, "expert_tensor": 2},
        {"expert": 1},
    ],
)
def test_layouts(ranks, dispatcher, layout):
    compare(ranks, 4, dispatcher, layout, 0)


def compare(ranks, world, dispatcher, layout, shared, exposed=None):
    overrides = {"moe_token_dispatcher_type": dispatcher}
    if shared:
        overrides["moe_shared_expert_intermediate_size"] = shared
    ep, etp = layout["expert"], layout.get("expert_tensor", 1)
    sizes = Sizes(
        layer_ranks.TOKENS,
        layer_ranks.HIDDEN,
        layer_ranks.EXPERTS,
        2,
        layer_ranks.FFN,
        ep,
        etp,
        itemsize=4,
        shared=shared,
    )
    for results in ranks(
        world, timeline_ranks.watch, "te", layout, overrides, VARIANTS, setup=ADAPTOR
    ):
        for number, (changes, watched) in enumerate(zip(VARIANTS, results, strict=True)):
            request = LayerRequest(**changes)
            group = watched.choices[watched.rank - watched.rank % sizes.ranks :][: sizes.ranks]
            load = load_of(sizes, group, watched.rank % sizes.ranks)
            line = simulate(
                choice_of(dispatcher, request).program(request),
                COSTS[dispatcher](sizes, load, anchored=request.overlap),
                RATES,
            )
            agree(line, watched, glue=ep == 1)
            if exposed is not None:
                counts = tuple(len(line.log.exposed(phase)) for phase in PHASES)
                assert counts == exposed[number]


def agree(line, watched, glue=False):
    """Events, bytes, calls, exposed collectives and seconds of both passes.

    ``glue``: the sum over slices, a part of its collective, takes time on the clock.
    """
    for phase in PHASES:
        assert list(map(str, line.log.of(phase))) == list(map(str, watched.log.of(phase)))
        starts = [event.bytes for event in line.log.communications(phase)]
        assert starts == [event.bytes for event in watched.log.communications(phase)]
        sent = [
            (one.communication.op, one.communication.wire)
            for one in of_phase(watched.intervals, "communication", phase)
        ]
        assert [(m.op, m.wire) for m in line.messages[phase]] == sent
        waits = of_phase(watched.intervals, "wait", phase)
        assert line.exposed(phase) == pytest.approx(sum(w.seconds for w in waits), rel=1e-9)
        exposed = line.log.exposed(phase)
        assert exposed == watched.log.exposed(phase)
        hidden = len(of_phase(watched.hidden, "wait", phase))
        assert hidden == len(exposed) or (glue and hidden < len(exposed))
    assert line.total == pytest.approx(watched.now, rel=1e-9)


def of_phase(intervals, kind, phase):
    return [one for one in intervals if one.kind == kind and one.phase == phase]
