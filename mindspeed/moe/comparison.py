"""Every program of a mixture-of-experts layer for one job, priced by its simulation.

    found = compare(Job(Sizes(tokens=4096, hidden=2048, experts=128, topk=8, ffn=768, ep=8)))
    found[0].simulation.total, found[0].sent

A program that does not exist for these sizes has its reason instead of a price. Programs are those
that the layer executes (:mod:`mindspeed.moe.dispatch.choice`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal, Protocol

from mindspeed.moe import costs as formulas
from mindspeed.moe import parted_costs
from mindspeed.moe.ampipe import AMPIPE, TENSOR_OVERLAP
from mindspeed.moe.costs import PassMessage, StageCosts
from mindspeed.moe.deepspeed.gate import Capacity
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.dispatch.choice import choice_of
from mindspeed.moe.load.recorded import RecordedLoad
from mindspeed.moe.parted_costs import Attention
from mindspeed.moe.program import Program, Step
from mindspeed.moe.repetition import repeated
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.policy import ALL, LEVEL0, LEVEL1, SavePolicy
from mindspeed.moe.simulate import RankRates, Simulation, simulate, simulate_pair
from mindspeed.moe.sizes import Load, Sizes, padded, uniform
from mindspeed.moe.wire import BLOCK


class TimedLink(Protocol):
    """How long a communication takes, such as :class:`mindspeed.instruments.clock.Link`."""

    def seconds(self, nbytes: float) -> float:
        """Seconds of a communication that sends ``nbytes``."""
        ...


@dataclass(frozen=True)
class Entry:
    """One line of the comparison.

    Attributes:
        dispatcher: Megatron's ``--moe-token-dispatcher-type``.
        flags: that train with it.
        request: fields of :class:`LayerRequest`.
        policy: what the experts keep.
        packed: False for Megatron's own layer, which sends probabilities by themselves.
        extended: tensor-parallel ranks hold whole experts.
        order: the program, where it is not the dispatcher's.
        chunks: of the sequence, attention included, in which ``order`` runs.
        pair: two micro-batches run at once; "delayed": their weight gradients are apart.
        exact: the numbers of a training stay those of Megatron's own layer.
        carrier: what moves rows of a bound on NVIDIA GPUs, and on no other device; "": blocks do.
    """

    dispatcher: str
    flags: str
    request: Mapping[str, Any] = field(default_factory=dict)
    policy: SavePolicy = ALL
    packed: bool = True
    extended: bool = False
    order: Program | None = None
    chunks: int = 1
    pair: Literal["", "plain", "delayed"] = ""
    exact: bool = True
    carrier: Literal["", "symmetric-memory", "hybridep"] = ""


SHARED_OVERLAP = Program.parse(
    "route count! permute dispatch> shared_fc1 dispatch< gather! arrange experts disarrange "
    "scatter! combine> shared_fc2 combine< unpermute"
)
"""Megatron's: shared experts run on a stream of their own beside the all-to-alls."""

_ASYNC, _OVERLAP = {"async_permutation": True}, {"overlap": True}
_TO, _GATHER = "--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm"

ENTRIES: dict[str, Entry] = {
    "megatron": Entry("alltoall", "none: Megatron's own", packed=False),
    "shared-overlap": Entry(
        "alltoall",
        "--moe-shared-expert-overlap: Megatron's own",
        packed=False,
        order=SHARED_OVERLAP,
    ),
    "1f1b": Entry(
        "alltoall",
        "--overlap-moe-expert-parallel-comm: Megatron's own",
        packed=False,
        pair="plain",
    ),
    "async": Entry("alltoall", "--moe-permutation-async-comm", _ASYNC),
    "overlap": Entry("alltoall", _TO, _OVERLAP),
    "overlap-level0": Entry("alltoall", f"{_TO} --moe-zero-memory level0", _OVERLAP, LEVEL0),
    "overlap-level1": Entry("alltoall", f"{_TO} --moe-zero-memory level1", _OVERLAP, LEVEL1),
    "fp8": Entry(
        "alltoall",
        f"--moe-fp8-dispatch tokens {_TO}",
        {**_OVERLAP, "fp8": "tokens"},
        exact=False,
    ),
    "fp8-both": Entry(
        "alltoall", f"--moe-fp8-dispatch both {_TO}", {**_OVERLAP, "fp8": "both"}, exact=False
    ),
    "device": Entry(
        "alltoall",
        f"--moe-device-bound 1.25 {_TO}",
        {**_OVERLAP, "exchange": "device", "bound": DeviceBound(1.25)},
    ),
    "device-symmetric": Entry(
        "alltoall",
        f"--moe-device-bound 1.25 --moe-device-bound-exchange symmetric-memory {_TO}",
        {**_OVERLAP, "exchange": "device", "bound": DeviceBound(1.25)},
        carrier="symmetric-memory",
    ),
    "device-hybridep": Entry(
        "alltoall",
        "--moe-device-bound 1.25 --moe-device-bound-exchange hybridep",
        {"exchange": "hybridep", "bound": DeviceBound(1.25)},
        carrier="hybridep",
    ),
    "dedup": Entry(
        "alltoall", f"--moe-alltoall-exchange dedup {_TO}", {**_OVERLAP, "exchange": "dedup"}
    ),
    "hierarchical": Entry(
        "alltoall",
        f"--moe-alltoall-exchange hierarchical {_TO}",
        {**_OVERLAP, "exchange": "hierarchical"},
    ),
    "pieces": Entry(
        "alltoall", "--use-pipe-experts --pipe-experts-multi-data 2", {"pipe_slices": 2}
    ),
    "padded": Entry(
        "alltoall",
        f"--moe-model-type deepspeed_moe {_TO}",
        {**_OVERLAP, "exchange": "padded"},
        exact=False,
    ),
    "groups": Entry(
        "alltoall",
        f"--moe-experts-pipeline-degree 2 {_TO}",
        {**_OVERLAP, "expert_groups": 2},
    ),
    "balanced": Entry(
        "alltoall",
        f"--balanced-moe-experts {_TO}",
        {**_OVERLAP, "hot_experts": 3, "hot_messages": 3},
    ),
    "ampipe": Entry("alltoall", "--ampipe-degree 2", order=AMPIPE, chunks=2),
    "ampipe-slices": Entry(
        "alltoall", "--ampipe-degree 4 --ampipe-tp-sp-comm-overlap", order=TENSOR_OVERLAP, chunks=4
    ),
    "fb-overlap": Entry("alltoall", "--moe-fb-overlap", packed=False, pair="delayed"),
    "extended": Entry("alltoall", "--moe-tp-extend-ep", extended=True),
    "extended-overlap": Entry("alltoall", f"--moe-tp-extend-ep {_TO}", _OVERLAP, extended=True),
    "allgather": Entry(
        "allgather", "none: Megatron's own with the dispatcher allgather", packed=False
    ),
    "allgather-async": Entry("allgather", "--moe-permutation-async-comm", _ASYNC),
    "allgather-overlap": Entry("allgather", _GATHER, _OVERLAP),
}


def _costs(
    entry: Entry,
    request: LayerRequest,
    sizes: Sizes,
    load: Load,
    recorded: RecordedLoad | None = None,
) -> tuple[dict[str, StageCosts], parted_costs.Parts]:
    anchored = request.overlap
    if request.pipe_slices:
        parts = [load.part(request.pipe_slices * sizes.local)]
        parts *= request.pipe_slices * sizes.local
        return parted_costs.pieces(sizes, load, parts, request.pipe_slices)
    if request.expert_groups > 1:
        parts = [load.part(request.expert_groups)] * request.expert_groups
        return parted_costs.groups(sizes, load, parts, anchored=anchored)
    if request.hot_experts:
        return _hot(request, sizes, load, recorded), {}
    if request.exchange == "dedup":
        return parted_costs.dedup(sizes, load, anchored=anchored), {}
    if request.exchange == "hierarchical":
        return parted_costs.two_level(sizes, load, anchored=anchored), {}
    price = formulas.all_to_all if entry.dispatcher == "alltoall" else formulas.all_gather
    costs = price(sizes, load, anchored=anchored, packed=entry.packed)
    if request.bound is not None:
        bound = request.bound.rows(sizes.tokens, sizes.topk, sizes.ep, sizes.local)
        return parted_costs.bounded(costs, sizes, load, bound, entry.carrier), {}
    return formulas.in_eight_bits(costs, sizes, request.fp8) if request.fp8 else costs, {}


def _hot(
    request: LayerRequest, sizes: Sizes, load: Load, recorded: RecordedLoad | None
) -> dict[str, StageCosts]:
    """Hot experts of as many ranks, of each as probably.

    By recorded routing they are those that the layer chooses; else none has more rows than another.
    """
    if recorded is None:
        part = request.hot_experts / sizes.experts
        load, own_rows = load.scaled(1 - part), sizes.tokens * sizes.topk * part
    else:
        hot = recorded.hot(sizes, request.hot_experts)
        load, own_rows = recorded(sizes, hot), recorded.own_rows(sizes, hot)
    each = request.hot_experts / request.hot_messages / sizes.ep
    owned = ceil(each)  # by the rank that owns most of a message
    weights = [[each] * sizes.ep] * request.hot_messages
    return parted_costs.hot(
        sizes,
        load,
        own_rows,
        weights,
        anchored=request.overlap,
        busiest=owned / each,
    )


@dataclass(frozen=True)
class LayerJob:
    """The layer, cluster and parallel sizes that programs are priced for.

    Attributes:
        sizes: of the layer, with the expert tensor parallel size that Megatron uses.
        tp: tensor parallel size of attention.
        capacity_factor: room of an expert in mean loads, where rows are padded.
        attention: of the layer, which some programs compute beside collectives of experts.
        recorded: routing of a run; None: even.
    """

    sizes: Sizes
    rates: RankRates
    tp: int = 1
    capacity_factor: float = 1.0
    attention: Attention = field(default_factory=Attention)
    recorded: RecordedLoad | None = None


@dataclass(frozen=True)
class PricedProgram:
    """One program.

    Attributes:
        flags: that train with it.
        simulation: of both passes; None if it does not exist for the job.
        kept: bytes of experts' rows that live until backward.
    """

    name: str
    flags: str
    simulation: Simulation | None
    reason: str = ""
    kept: float = 0.0

    def exposed(self, phase: str) -> int:
        """Collectives of a pass with no computation beside them."""
        assert self.simulation is not None
        return len(self.simulation.log.exposed(phase))


def rates_of(
    flops_per_second: float,
    inside: TimedLink,
    between: TimedLink,
    bytes_per_second: float | None = None,
) -> RankRates:
    """Rates over two links, of a node and between nodes, which carry their parts at once."""

    def seconds(message: PassMessage) -> float:
        copied = message.copied / bytes_per_second if bytes_per_second else 0.0
        within = inside.seconds((message.wire - message.between) * message.busiest)
        if not message.between:
            return copied + within
        return copied + max(within, between.seconds(message.between * message.busiest))

    return RankRates(flops_per_second, seconds, bytes_per_second)


def compare(job: LayerJob, names: Sequence[str] = tuple(ENTRIES)) -> list[PricedProgram]:
    """Price programs, in the order of ``names``."""
    return [_price(job, name) for name in names]


def _price(job: LayerJob, name: str) -> PricedProgram:
    entry, sizes = ENTRIES[name], job.sizes
    reason = _reason(job, entry)
    if reason:
        return PricedProgram(name, entry.flags, None, reason)
    if entry.extended:
        sizes = replace(sizes, ep=sizes.ep * job.tp, etp=1)
    load = uniform(sizes) if job.recorded is None else job.recorded(sizes)
    if entry.request.get("exchange") == "padded":
        capacity = Capacity(job.capacity_factor, sizes.experts, sizes.topk)
        load = padded(sizes, capacity(sizes.tokens))
    request = LayerRequest(**entry.request)
    rows = load.rows
    if request.bound is not None:
        blocks = request.bound.rows(sizes.tokens, sizes.topk, sizes.ep, sizes.local)
        rows = float(blocks * sizes.ranks)
    kept = formulas.saved_bytes(sizes, rows, entry.policy)
    kept += request.hot_experts * parted_costs.expert_bytes(sizes)
    return PricedProgram(
        name, entry.flags, _simulation(job, entry, request, sizes, load), kept=kept
    )


def _simulation(
    job: LayerJob, entry: Entry, request: LayerRequest, sizes: Sizes, load: Load
) -> Simulation:
    if entry.chunks > 1:
        parts = [load.part(entry.chunks)] * entry.chunks
        attention = job.attention.chunks(entry.chunks, job.tp)
        assert entry.order is not None
        return simulate(entry.order, parted_costs.chunks(sizes, parts, attention), job.rates)
    if entry.pair:
        delayed = entry.pair == "delayed"
        costs = formulas.all_to_all(sizes, load, anchored=delayed, packed=entry.packed)
        return simulate_pair({**costs, "attn": job.attention.whole()}, job.rates)
    costs, inner = _costs(entry, request, sizes, load, job.recorded)
    order = entry.order or choice_of(entry.dispatcher, request).program(request)
    return simulate(
        Program((Step("attn"), *order.steps)),
        {**costs, "attn": job.attention.whole()},
        job.rates,
        inner=inner,
        repeat=repeated(entry.policy, sizes, load, costs),
    )


def _reason(job: LayerJob, entry: Entry) -> str:
    sizes = job.sizes
    if entry.extended:
        if job.tp == 1:
            return "with --tp 1 there are no ranks to extend by"
        if sizes.experts % (sizes.ep * job.tp):
            return f"{sizes.experts} experts cannot be divided by --ep {sizes.ep} x --tp {job.tp}"
        return ""
    if reason := _reason_of_order(job, entry):
        return reason
    exchange = entry.request.get("exchange", "flat")
    if entry.request.get("fp8") and sizes.hidden % BLOCK:
        return f"{BLOCK} does not divide the {sizes.hidden} elements of a row"
    if exchange == "padded":
        if sizes.topk > 2:
            return f"DeepSpeed's gates are top-1 and top-2, not top-{sizes.topk}"
    elif exchange not in ("flat", "device") and sizes.etp > 1:
        return f"slices of an expert (--etp {sizes.etp}) need every copy of a token"
    if exchange in ("device", "hybridep") and sizes.ep == 1:
        return "with --ep 1 nothing is sent by all-to-all"
    if exchange == "hierarchical" and (
        sizes.node is None or sizes.ep % sizes.node or sizes.ep == sizes.node or sizes.node == 1
    ):
        return f"--ep {sizes.ep} are not several nodes of {sizes.node} ranks (--node-size)"
    if (parts := entry.request.get("expert_groups", 1)) > 1:
        if sizes.etp == 1:
            return "with --etp 1 there are no collectives that groups could hide"
        if sizes.local % parts:
            return f"{parts} groups do not divide the {sizes.local} experts of a rank"
    if (slices := entry.request.get("pipe_slices", 0)) and slices > sizes.tokens:
        return f"{slices} slices of {sizes.tokens} tokens"
    if entry.request.get("pipe_slices") and sizes.ranks == 1:
        return "with one expert rank there is nothing to overlap"
    if entry.request.get("overlap") and sizes.ranks == 1:
        return "with one expert rank there is nothing to overlap"
    return ""


def _reason_of_order(job: LayerJob, entry: Entry) -> str:
    """Why what is computed beside the collectives cannot be."""
    sizes = job.sizes
    if entry.order is SHARED_OVERLAP and not sizes.shared:
        return "without shared experts there is nothing to compute beside the all-to-alls"
    if (entry.pair or entry.chunks > 1 or entry.order) and sizes.ep == 1:
        return "--expert-model-parallel-size is 1, so there is no all-to-all to hide"
    if entry.chunks > 1 and sizes.tokens % entry.chunks:
        return f"{entry.chunks} chunks do not divide the {sizes.tokens} tokens of a rank"
    if entry.order is TENSOR_OVERLAP and sizes.etp == 1:
        return "with --etp 1 there are no collectives of slices"
    if most := entry.request.get("hot_experts", 0):
        if sizes.etp > 1:
            return f"hot experts are whole, not sliced (--etp {sizes.etp})"
        if sizes.ep == 1:
            return "with --ep 1 there are no other ranks to compute hot experts"
        if most > sizes.local:
            return f"{most} hot experts are more than the {sizes.local} of a rank"
    return ""
