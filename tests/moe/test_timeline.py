"""The simulated timeline, the interpreter's event log and the virtual clock agree.

The layer runs on gloo ranks; the formulas get the routing that its router has chosen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed.instruments.clock import Link
from mindspeed.moe import costs as formulas
from mindspeed.moe import parted_costs
from mindspeed.moe.ampipe import AMPIPE
from mindspeed.moe.comparison import SHARED_OVERLAP
from mindspeed.moe.costs import packed_row
from mindspeed.moe.deepspeed.gate import Capacity
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.dispatch.choice import choice_of
from mindspeed.moe.hot_experts import choose
from mindspeed.moe.parted_costs import Attention, bounded
from mindspeed.moe.repetition import repeated
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.policy import ALL, LEVEL0, LEVEL1
from mindspeed.moe.simulate import RankRates, simulate
from mindspeed.moe.sizes import Sizes, padded
from tests.moe import ampipe_ranks, layer_ranks, timeline_ranks
from tests.moe.actual_load import load_of
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
VARIANTS = [{}, {"async_permutation": True}, {"overlap": True}]
LINK = Link(timeline_ranks.BYTES, timeline_ranks.LATENCY)
RATES = RankRates(timeline_ranks.FLOPS, lambda message: LINK.seconds(message.wire))
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


@pytest.mark.weekly_cases("*-20")
@pytest.mark.slow
@pytest.mark.parametrize(("dispatcher", "shared"), EXPOSED)
def test_one_expert_group(ranks, dispatcher, shared):
    compare(ranks, 2, dispatcher, {"expert": 2}, shared, EXPOSED[dispatcher, shared])


SAVED = [
    {"overlap": overlap, "save": policy} for overlap in (True, False) for policy in (LEVEL0, LEVEL1)
]
SLICED = {"expert": 2, "expert_tensor": 2, "tensor": 2}


@pytest.mark.weekly_cases("layout2-0")
@pytest.mark.parametrize(
    ("layout", "shared"),
    [({"expert": 2}, 0), ({"expert": 2}, SHARED), pytest.param(SLICED, 0, marks=pytest.mark.slow)],
)
def test_save_policies(ranks, layout, shared):
    """The dispatch again in backward, beside the combine."""
    world = layout["expert"] * layout.get("tensor", 1)
    compare(ranks, world, "alltoall", layout, shared, variants=SAVED)


PARTS = [{"pipe_slices": 1}, {"pipe_slices": 5}]
HOT = [
    {"hot_experts": 2, "hot_messages": messages, "dropped": True, "overlap": overlap}
    for messages, overlap in ((2, False), (1, True))
]
ROOM = [
    {"exchange": "padded", "capacity": Capacity(1.5, layer_ranks.EXPERTS, 2), "overlap": overlap}
    for overlap in (False, True)
]
ONCE = [{"exchange": "dedup"}, {"exchange": "dedup", "overlap": True}]
GROUPED = [
    {"expert_groups": count, "overlap": overlap} for count in (2, 4) for overlap in (False, True)
]


@pytest.mark.weekly_cases("pieces-0", "dedup-20", "padded-0", "hot-20")
@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize(
    "variants", [PARTS, ONCE, ROOM, HOT], ids=["pieces", "dedup", "padded", "hot"]
)
def test_experts_in_pieces_and_tokens_sent_once(ranks, variants, shared):
    compare(ranks, 2, "alltoall", {"expert": 2}, shared, variants=variants)


@pytest.mark.weekly_cases("layout0")
@pytest.mark.parametrize(
    "layout",
    [{"expert": 1, "expert_tensor": 2, "tensor": 2}, pytest.param(SLICED, marks=pytest.mark.slow)],
)
def test_experts_in_groups(ranks, layout):
    """Only the first gather and the last sum are exposed."""
    world = layout["expert"] * layout["tensor"]
    compare(ranks, world, "alltoall", layout, 0, variants=GROUPED)


BOUNDED = [{"exchange": "device", "bound": DeviceBound(100.0), "overlap": o} for o in (False, True)]


@pytest.mark.parametrize("carrier", ["", "symmetric-memory"])
@pytest.mark.parametrize(
    "layout", [{"expert": 2}, pytest.param(SLICED, marks=pytest.mark.slow)], ids=["whole", "slices"]
)
def test_sizes_on_the_device(ranks, layout, carrier):
    """Events and bytes; products of the emulated kernels take whole buffers."""
    ep, etp = layout["expert"], layout.get("expert_tensor", 1)
    sizes = Sizes(layer_ranks.TOKENS, layer_ranks.HIDDEN, layer_ranks.EXPERTS, 2, layer_ranks.FFN,
                  ep, etp, itemsize=4)  # fmt: skip
    symmetric = bool(carrier)
    for results, rows in ranks(
        ep * etp, timeline_ranks.watch_bounded, layout, BOUNDED, symmetric, setup=ADAPTOR
    ):
        for changes, watched in zip(BOUNDED, results, strict=True):
            request = LayerRequest(**changes)
            load = load_of(sizes, watched.choices, watched.rank)
            costs = formulas.all_to_all(sizes, load, anchored=request.overlap)
            bound = request.bound.rows(sizes.tokens, sizes.topk, ep, sizes.local)
            costs = bounded(costs, sizes, load, bound, carrier)
            line = simulate(choice_of("alltoall", request).program(request), costs, RATES)
            for phase in PHASES:
                events = line.log.of(phase), watched.log.of(phase)
                assert [*map(str, events[0])] == [*map(str, events[1])]
                starts = [one.communications(phase) for one in (line.log, watched.log)]
                assert [e.bytes for e in starts[0]] == [e.bytes for e in starts[1]]
                sent = of_phase(watched.intervals, "communication", phase)
                found = [message.wire for message in line.messages[phase]]
                if not symmetric:
                    assert found == [one.communication.wire for one in sent]
            if symmetric:  # its kernel counts the rows for itself, those that stay, too
                (dispatch,) = costs["dispatch"].messages
                assert (rows[0] - load.sent[load.rank]) * packed_row(sizes) == dispatch.wire


@pytest.mark.weekly_cases("layout1-*", "layout2-allgather", "layout3-alltoall", "layout3-alltoall")
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


OWN = [
    {},
    {"moe_shared_expert_intermediate_size": SHARED},
    {"moe_shared_expert_intermediate_size": SHARED, "moe_shared_expert_overlap": True},
]


def test_megatrons_own_layer(ranks):
    """Order and bytes of its collectives, and what is computed before each is started."""
    sizes = Sizes(layer_ranks.TOKENS, layer_ranks.HIDDEN, layer_ranks.EXPERTS, 2, layer_ranks.FFN,
                  ep=2, itemsize=4)  # fmt: skip
    plain = choice_of("alltoall", LayerRequest()).program(LayerRequest())
    for results in ranks(2, timeline_ranks.watch_megatrons, {"expert": 2}, OWN, setup=ADAPTOR):
        for overrides, watched in zip(OWN, results, strict=True):
            one = replace(sizes, shared=overrides.get("moe_shared_expert_intermediate_size", 0))
            load = load_of(one, watched.choices, watched.rank)
            costs = formulas.all_to_all(one, load, packed=False)
            overlaps = "moe_shared_expert_overlap" in overrides
            line = simulate(SHARED_OVERLAP if overlaps else plain, costs, RATES)
            for phase in PHASES:
                expected = started(line.intervals, phase)
                found = started(watched.intervals, phase)
                if overlaps and phase == formulas.BACKWARD:
                    # Probabilities follow the rows; shared experts have a stream of their own.
                    combine, probs, rows = expected
                    shared = costs["shared_fc1"].backward.flops / timeline_ranks.FLOPS
                    expected = [combine, rows, (probs[0] + shared, probs[1])]
                assert found == [pytest.approx(one, rel=1e-9) for one in expected]
            if not overlaps:
                assert line.total == pytest.approx(watched.now, rel=1e-9)


def started(intervals, phase):
    """(seconds computed before, seconds of the communication) of each."""
    computed, found = 0.0, []
    for one in intervals:
        if one.phase == phase and one.kind == "compute":
            computed += one.seconds
        elif one.phase == phase and one.kind == "communication":
            found.append((computed, one.seconds))
    return found


@pytest.mark.parametrize("shared", [0, SHARED])
def test_chunks_of_the_sequence(ranks, shared):
    overrides = {"moe_shared_expert_intermediate_size": shared} if shared else {}
    degree, tokens = 2, ampipe_ranks.LENGTH * ampipe_ranks.BATCH
    sizes = Sizes(tokens, layer_ranks.HIDDEN, layer_ranks.EXPERTS, 2, layer_ranks.FFN, ep=2,
                  itemsize=4, shared=shared)  # fmt: skip
    for log, choices, rank in ranks(
        2, timeline_ranks.watch_chunks, {"expert": 2}, overrides, degree, setup=ADAPTOR
    ):
        parts = [load_of(sizes, chunk, rank) for chunk in choices]
        attention = Attention(1.0, 1.0, 1.0).chunks(degree, 1)
        line = simulate(AMPIPE, parted_costs.chunks(sizes, parts, attention), RATES)
        for phase in PHASES:
            events = [[(str(e), e.chunk) for e in one.of(phase)] for one in (line.log, log)]
            assert events[0] == events[1]
            starts = [[e.bytes for e in one.communications(phase)] for one in (line.log, log)]
            assert starts[0] == starts[1]
            assert line.log.exposed(phase) == log.exposed(phase)


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
    if request.hot_experts:
        return hot_experts(request, sizes, choices, rank), {}
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


def hot_experts(request, sizes, choices, rank):
    """What travels, what stays, and who owns the experts of each message."""
    counts = torch.zeros(sizes.ep, sizes.experts, dtype=torch.int64)
    for row, tokens in zip(counts, choices, strict=True):
        row += torch.tensor([e for token in tokens for e in token]).bincount(
            minlength=sizes.experts
        )
    hot = choose(counts, request.hot_experts)
    left = [[[e for e in token if e not in hot] for token in tokens] for tokens in choices]
    messages = torch.tensor(hot).tensor_split(request.hot_messages)
    owned = [
        [sum(e // sizes.local == one for e in message.tolist()) for one in range(sizes.ep)]
        for message in messages
    ]
    load, own_rows = load_of(sizes, left, rank), int(counts[rank, hot].sum())
    return parted_costs.hot(sizes, load, own_rows, owned, anchored=request.overlap)


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
