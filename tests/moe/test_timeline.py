"""The simulated timeline, the interpreter's event log and the virtual clock agree.

The layer runs on gloo ranks; the formulas get the routing that its router has chosen.
"""

from __future__ import annotations

import pytest

from mindspeed.moe import costs as formulas
from mindspeed.moe import parted_costs
from mindspeed.moe.deepspeed.capacity import Capacity
from mindspeed.moe.dispatch.choice import choice_of
from mindspeed.moe.repetition import repeated
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.policy import ALL, LEVEL0, LEVEL1
from mindspeed.moe.sizes import Sizes, load_of, padded
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


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("dispatcher", "shared"), EXPOSED)
def test_one_expert_group(ranks, dispatcher, shared):
    compare(ranks, 2, dispatcher, {"expert": 2}, shared, EXPOSED[dispatcher, shared])


SAVED = [
    {"overlap": overlap, "save": policy} for overlap in (True, False) for policy in (LEVEL0, LEVEL1)
]
SLICED = {"expert": 2, "expert_tensor": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("layout", "shared"),
    [({"expert": 2}, 0), ({"expert": 2}, SHARED), pytest.param(SLICED, 0, marks=pytest.mark.slow)],
)
def test_save_policies(ranks, layout, shared):
    """The dispatch again in backward, beside the combine."""
    world = layout["expert"] * layout.get("tensor", 1)
    compare(ranks, world, "alltoall", layout, shared, variants=SAVED)


PARTS = [{"pipe_slices": 1}, {"pipe_slices": 5}]
ROOM = [
    {"exchange": "padded", "capacity": Capacity(1.5, layer_ranks.EXPERTS, 2), "overlap": overlap}
    for overlap in (False, True)
]
ONCE = [{"exchange": "dedup"}, {"exchange": "dedup", "overlap": True}]
GROUPED = [
    {"expert_groups": count, "overlap": overlap} for count in (2, 4) for overlap in (False, True)
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize("variants", [PARTS, ONCE, ROOM], ids=["pieces", "dedup", "padded"])
def test_experts_in_pieces_and_tokens_sent_once(ranks, variants, shared):
    compare(ranks, 2, "alltoall", {"expert": 2}, shared, variants=variants)


@pytest.mark.parametrize(
    "layout",
    [{"expert": 1, "expert_tensor": 2, "tensor": 2}, pytest.param(SLICED, marks=pytest.mark.slow)],
)
def test_experts_in_groups(ranks, layout):
    """Only the first gather and the last sum are exposed."""
    world = layout["expert"] * layout["tensor"]
    compare(ranks, world, "alltoall", layout, 0, variants=GROUPED)


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


def compare(ranks, world, dispatcher, layout, shared, exposed=None, variants=VARIANTS):
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
        world, timeline_ranks.watch, "te", layout, overrides, variants, setup=ADAPTOR
    ):
        for number, (changes, watched) in enumerate(zip(variants, results, strict=True)):
            request = LayerRequest(**changes)
            group = watched.choices[watched.rank - watched.rank % sizes.ranks :][: sizes.ranks]
            load = load_of(sizes, group, watched.rank % sizes.ranks)
            costs, inner = priced(dispatcher, request, sizes, group, watched.rank % sizes.ranks)
            line = simulate(
                choice_of(dispatcher, request).program(request),
                costs,
                RATES,
                inner=inner,
                repeat=repeated(request.save, sizes, load, costs),
            )
            agree(line, watched, glue=etp > 1 or request.save != ALL or request.pipe_slices)
            if exposed is not None:
                counts = tuple(len(line.log.exposed(phase)) for phase in PHASES)
                assert counts == exposed[number]


def priced(dispatcher, request, sizes, choices, rank):
    """Costs of the stages for an actual routing, and of programs inside of them."""
    load = load_of(sizes, choices, rank)
    if request.exchange == "padded":
        load = padded(sizes, request.capacity(sizes.tokens))
    if request.exchange == "dedup":
        return parted_costs.dedup(sizes, load, anchored=request.overlap), {}
    if (count := request.expert_groups) > 1:
        size = sizes.local // count
        ranges = [(i * size, (i + 1) * size) for i in range(count)]
        parts = [load_of(sizes, choices, rank, part) for part in ranges]
        return parted_costs.groups(sizes, load, parts, anchored=request.overlap)
    if count := request.pipe_slices:
        split = [cut(tokens, count) for tokens in choices]  # [ranks][slices]
        parts = [
            load_of(sizes, [one[j] for one in split], rank, (i, i + 1))
            for j in range(count)
            for i in range(sizes.local)
        ]
        return parted_costs.pieces(sizes, load, parts, count)
    return COSTS[dispatcher](sizes, load, anchored=request.overlap), {}


def cut(tokens, slices):
    """As ``tensor_split``: the first slices are one longer, where they are not equal."""
    size, longer = divmod(len(tokens), slices)
    ends = [(i + 1) * size + min(i + 1, longer) for i in range(slices)]
    return [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def agree(line, watched, glue=False):
    """Events, bytes, calls, exposed collectives and seconds of both passes.

    ``glue``: on the clock the sum over slices, the permutation before a repeated dispatch and the
    cutting of pieces take time, which the log has no events of.
    """
    for phase in PHASES:
        assert " ".join(map(str, line.log.of(phase))) == " ".join(map(str, watched.log.of(phase)))
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
    phases = (phase, "recompute") if phase == formulas.BACKWARD else (phase,)
    return [one for one in intervals if one.kind == kind and one.phase in phases]
