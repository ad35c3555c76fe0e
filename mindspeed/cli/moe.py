"""Compare programs of a mixture-of-experts layer without running them: bytes, time, memory.

    mindspeed moe plan --model qwen3-30b-a3b --tokens 8K --ep 8
    mindspeed moe plan --model deepseek-v3 --tokens 4K --ep 32 --node-size 8 --plot layer.png
    mindspeed moe plan --hidden-size 4096 --num-experts 8 --moe-router-topk 2 \\
        --moe-ffn-hidden-size 14336 --tokens 8K --tp 2 --ep 4 --text

One layer, attention and experts, forward and backward, of one rank with even routing: each
program's steps run in their order over two links (inside a node, between nodes) and at rates of
matrix products and of memory. Exposed collectives are those with no computation between their start
and their end. No device is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mindspeed.cli.comparison import as_entries, chosen, print_comparison, tokens
from mindspeed.cli.plot import check_format
from mindspeed.cli.timeline_plot import Style, draw
from mindspeed.errors import ConfigError
from mindspeed.instruments.clock import Link
from mindspeed.instruments.timeline import Interval, Timeline, text
from mindspeed.moe.comparison import ENTRIES, LayerJob, PricedProgram, compare, rates_of
from mindspeed.moe.costs import BACKWARD, FORWARD
from mindspeed.moe.parted_costs import Attention
from mindspeed.moe.simulate import Simulation
from mindspeed.moe.sizes import Sizes
from mindspeed.profiling.model_flops import ModelShape, attention_products
from mindspeed.ranges import ABOVE_ZERO, MAX_SIZE, NOT_NEGATIVE, Range, number, whole

HELP = "compare and draw programs of mixture-of-experts layers: bytes, exposed time, memory"

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_EXPERTS, MAX_GROUP = 16384, 4096
_VISIBLE = 1e-3  # part of the time
# What the legend says -> (colour, names of stages and messages)
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "experts": ("#10b981", ("experts",)),
    "weight gradients of experts": ("#f59e0b", ("weight_gradients",)),
    "shared experts": ("#3b82f6", ("shared", "shared_fc1", "shared_fc2")),
    "hot experts": ("#fcd34d", ("hot",)),
    "attention": ("#818cf8", ("attn",)),
    "router": ("#94a3b8", ("route",)),
    "rows moved": ("#67e8f9", ("permute", "unpermute", "arrange", "disarrange", "relay", "merge")),
    "computed again": ("#a855f7", ("recompute", "recompute_shared")),
    "dispatch": ("#0f766e", ("dispatch", "dispatch_node", "tokens")),
    "combine": ("#be185d", ("combine", "combine_node")),
    "dispatch again": ("#7c3aed", ("refetch",)),
    "slices: gather, sum": ("#ca8a04", ("gather", "scatter")),
    "counts, ids, weights": ("#475569", ("count", "ids", "weights")),
}
# Flag -> what a model says in its place.
_OF_MODEL = {
    "--hidden-size": "hidden_size",
    "--num-experts": "num_experts",
    "--moe-router-topk": "moe_router_topk",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=["plan"], help="plan: price and draw the programs of a layer")
    _layer_arguments(parser)
    _machine_arguments(parser)
    add(
        "--programs",
        default="all",
        metavar="NAMES",
        help=f"all, or some of {', '.join(ENTRIES)}, separated by commas",
    )
    add(
        "--routing",
        type=Path,
        metavar="DIR",
        help="price the routing that --moe-record-routing has recorded, and place experts",
    )
    add(
        "--placement",
        type=Path,
        metavar="FILE",
        help="with --routing: write the placement, for --moe-expert-placement",
    )
    add(
        "--measured",
        type=Path,
        metavar="FILE",
        help="of mindspeed calibrate --experts: show its times beside the modelled ones",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the timelines: .png, .svg or .pdf")
    add("--text", action="store_true", help="draw the timelines in the terminal")
    add("--json", action="store_true", help="print JSON")


def _layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the layer and of its micro-batch."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="take the sizes of a model: mindspeed models lists them")
    size, experts = whole(1, MAX_SIZE), whole(1, MAX_EXPERTS)
    add("--hidden-size", type=size, metavar="H")
    add("--num-experts", type=experts, metavar="E", help="experts of the layer")
    add("--moe-router-topk", type=experts, metavar="K", help="experts of a token")
    add("--moe-ffn-hidden-size", type=size, metavar="F", help="width of an expert")
    add(
        "--moe-shared-expert-intermediate-size",
        type=whole(0, MAX_SIZE),
        metavar="F",
        help="width of the shared experts together (default: 0, none)",
    )
    add(
        "--seq-length",
        type=size,
        metavar="S",
        help="of a sample, for the scores of attention (default: --tokens)",
    )
    add("--not-gated", action="store_true", help="experts without a gate (no SwiGLU)")
    add(
        "--tokens",
        type=tokens,
        default=4096,
        metavar="N",
        help="of a micro-batch: sequence x batch / context-parallel size; 8K is 8192 "
        "(default: 4096). A tensor-parallel rank has one part of them",
    )
    add(
        "--moe-train-capacity-factor",
        type=number(Range(0, 1e6, above=True)),
        default=1.0,
        metavar="C",
        help="room of an expert in mean loads, for the program padded",
    )
    add("--dtype", choices=sorted(ITEMSIZE), default="bf16", help="of tokens")


def _machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Ranks that share the layer, and how fast they compute and communicate."""
    add = parser.add_argument
    group = whole(1, MAX_GROUP)
    add("--tp", type=group, default=1, metavar="P", help="tensor-parallel size")
    add("--ep", type=group, default=8, metavar="P", help="expert-parallel size")
    add("--etp", type=group, metavar="P", help="expert tensor-parallel size (default: --tp)")
    rate, latency = number(ABOVE_ZERO), number(NOT_NEGATIVE)
    for flag, kind, default, unit, what in (
        ("--tflops", rate, 300.0, "T", "TFLOP/s"),
        ("--memory-bandwidth", rate, 2000.0, "GB/s", "for permutations"),
        ("--link-bandwidth", rate, 200.0, "GB/s", "that a rank sends inside its node"),
        ("--link-latency", latency, 10.0, "US", "microseconds until a message arrives there"),
        ("--network-bandwidth", rate, 25.0, "GB/s", "that a rank sends to other nodes"),
        ("--network-latency", latency, 20.0, "US", "microseconds until a message arrives there"),
    ):
        add(flag, type=kind, default=default, metavar=unit, help=what)
    add("--node-size", type=group, default=8, metavar="N", help="ranks of a node")


def run(args: argparse.Namespace) -> int:
    """Price the programs and print or draw them."""
    job, names = job_of(args), chosen("--programs", args.programs, ENTRIES)
    if args.plot:
        check_format("--plot", args.plot)
    if args.routing:
        return _run_recorded(args, job, names)
    if args.placement:
        raise ConfigError("--placement needs --routing DIR, the routing that experts are placed by")
    return _show(args, job, compare(job, names))


def _measured(args: argparse.Namespace, job: LayerJob) -> dict[str, Any]:
    """Seconds of programs by a measurement of this layer, and the device; empty without one."""
    if args.measured is None:
        return {}
    from mindspeed.planner.megatron_experts import read

    found = read(args.measured)
    found.check(job.sizes, job.tp, f"--measured {args.measured}")
    if found.dtype != args.dtype:
        raise ConfigError(
            f"--measured {args.measured} was measured in {found.dtype}, the plan has {args.dtype}"
        )
    return {"measured": dict(found.seconds), "measured_on": found.device}


def _print_measured(measured: dict[str, Any]) -> None:
    if not measured:
        return
    print(f"measured on {measured['measured_on']}, without attention:")
    for name, seconds in sorted(measured["measured"].items(), key=lambda one: float(one[1])):
        print(f"{seconds * 1e3:10.3f} ms  {name}: {ENTRIES[name].flags}")


def _run_recorded(args: argparse.Namespace, job: LayerJob, names: list[str]) -> int:
    """Place the experts of every layer, and price the fullest one."""
    from mindspeed.cli import moe_routing

    recorded = moe_routing.read_routing(args, _model(args), job.sizes)
    layers = moe_routing.place(recorded, job.sizes)
    job = replace(job, recorded=moe_routing.worst(recorded, layers))
    now, then = compare(job, names), moe_routing.placed_prices(job, names)
    if args.json:
        data = as_data(job, now)
        data["placed"] = as_entries(then, _figures)
        print(json.dumps({**data, "layers": moe_routing.as_data(layers)}, indent=2))
    else:
        moe_routing.print_layers(recorded, layers)
        _show(args, job, now)
        link = args.link_bandwidth if job.sizes.ep <= args.node_size else args.network_bandwidth
        moe_routing.print_exchange(job, layers, now, then, link * 1e9)
    if args.placement:
        moe_routing.write_placement(args, job.sizes, layers)
    return 0


def _show(args: argparse.Namespace, job: LayerJob, found: list[PricedProgram]) -> int:
    measured = _measured(args, job)
    if args.json:
        print(json.dumps({**as_data(job, found), **measured}, indent=2))
    else:
        print_table(job, found)
        _print_measured(measured)
    simulations = {one.name: one.simulation for one in found if one.simulation is not None}
    if not simulations:
        raise ConfigError("no program exists for these sizes; the reasons are above")
    if args.text:
        width = Console().width
        for name, one in simulations.items():
            print(f"\n{name}\n{text(one.lanes, width, _stage)}")
    if args.plot:
        lines = {_caption(name, one): visible(one.lanes) for name, one in simulations.items()}
        draw(lines, style(), args.plot, title(job))
    return 0


def style() -> Style:
    """Colours say what is computed or sent."""
    colors = {label: color for label, (color, _) in _KINDS.items()}
    labels = {name: label for label, (_, names) in _KINDS.items() for name in names}
    return Style(colors, label=lambda one: labels.get(_stage(one), ""))


def _stage(one: Interval) -> str:
    return one.name.partition(".")[0]


def visible(line: Timeline) -> Timeline:
    """Drop lanes on which nothing is visible."""
    shortest = _VISIBLE * line.end
    found = {one.lane for one in line.intervals if one.seconds > shortest}
    return replace(line, lanes=[lane for lane in line.lanes if lane in found] or line.lanes[:1])


def _caption(name: str, found: Simulation) -> str:
    exposed = [len(found.log.exposed(phase)) for phase in (FORWARD, BACKWARD)]
    return (
        f"{name}:  {found.total * 1e3:.4g} ms, waiting {found.exposed() * 1e3:.3g} ms,  exposed "
        f"collectives {exposed[0]} + {exposed[1]} of {found.calls(FORWARD)} + "
        f"{found.calls(BACKWARD)}"
    )


def job_of(args: argparse.Namespace) -> LayerJob:
    """The layer that the options of ``mindspeed moe plan`` describe.

    Raises:
        ConfigError: Sizes are missing, or do not suit each other.
    """
    model = _model(args)
    sizes = _sizes(args, model)
    rates = rates_of(
        args.tflops * 1e12,
        Link(args.link_bandwidth * 1e9, args.link_latency * 1e-6),
        Link(args.network_bandwidth * 1e9, args.network_latency * 1e-6),
        args.memory_bandwidth * 1e9,
    )
    attention = _attention(model, sizes, args.seq_length or args.tokens)
    return LayerJob(sizes, rates, args.tp, args.moe_train_capacity_factor, attention)


def _model(args: argparse.Namespace) -> dict[str, Any]:
    if args.model is None:
        return {}
    from mindspeed.models.presets import model_flags

    model = model_flags(args.model)
    if not model.get("num_experts"):
        raise ConfigError(f"--model {args.model} has no experts")
    return model


def _attention(model: dict[str, Any], sizes: Sizes, length: int) -> Attention:
    """Attention of the model, else of heads as wide as the hidden size; the mask is causal."""
    unused = {"num_layers": 1, "ffn_hidden_size": 0, "padded_vocab_size": 0}
    plain = {"num_attention_heads": 1, "group_query_attention": False}
    given = {**unused, **plain, **model, "hidden_size": sizes.hidden, "seq_length": length}
    shape = ModelShape.from_megatron(given, lambda layers: [True])
    if shape is None:
        return Attention()
    found, tokens = attention_products(shape), 2.0 * sizes.tokens
    return Attention(
        tokens * found.inputs, tokens * found.per_key * length / 2, tokens * found.output
    )


def _sizes(args: argparse.Namespace, model: dict[str, Any]) -> Sizes:
    found: dict[str, Any] = {}
    for flag, name in _OF_MODEL.items():
        given = getattr(args, name)
        found[name] = model.get(name) if given is None else given
        if found[name] is None and not name.startswith("moe_shared"):
            raise ConfigError(f"{flag} is missing, or --model with all sizes")
    experts, topk = found["num_experts"], found["moe_router_topk"]
    etp = args.etp or args.tp
    if topk > experts:
        raise ConfigError(
            f"--moe-router-topk {topk} is more than --num-experts {experts}: a token cannot have "
            "an expert twice"
        )
    if experts % args.ep:
        raise ConfigError(
            f"--ep {args.ep} does not divide --num-experts {experts}: every rank holds as many"
        )
    if found["moe_ffn_hidden_size"] % etp:
        raise ConfigError(
            f"--etp {etp} does not divide the width of an expert, {found['moe_ffn_hidden_size']}"
        )
    if args.tokens % args.tp:
        raise ConfigError(
            f"--tp {args.tp} does not divide --tokens {args.tokens}: with sequence parallelism a "
            "rank has one part of them"
        )
    if args.node_size % etp:
        raise ConfigError(
            f"--node-size {args.node_size}: slices of an expert (--etp {etp}) must be in one node"
        )
    return Sizes(
        tokens=args.tokens // args.tp,
        hidden=found["hidden_size"],
        experts=experts,
        topk=topk,
        ffn=found["moe_ffn_hidden_size"],
        ep=args.ep,
        etp=etp,
        itemsize=ITEMSIZE[args.dtype],
        shared=found["moe_shared_expert_intermediate_size"] or 0,
        gated=not args.not_gated,
        node=args.node_size,
    )


def as_data(job: LayerJob, found: Sequence[PricedProgram]) -> dict[str, object]:
    """Plain data for JSON: bytes, and seconds from the start of forward."""
    return {
        "sizes": asdict(job.sizes),
        "tp": job.tp,
        "programs": as_entries(found, _figures),
    }


def _figures(one: PricedProgram) -> dict[str, object]:
    line = one.simulation
    assert line is not None
    return {
        "sent": line.wire(),
        "sent_between_nodes": _between_nodes(line),
        "calls": {phase: line.calls(phase) for phase in (FORWARD, BACKWARD)},
        "exposed": {phase: one.exposed(phase) for phase in (FORWARD, BACKWARD)},
        "exposed_seconds": line.exposed(),
        "forward_seconds": line.ends[FORWARD],  # the end; backward may have begun before
        "seconds": line.total,
        "kept": one.kept,
        "intervals": [asdict(interval) for interval in line.intervals],
    }


def title(job: LayerJob) -> str:
    """The sizes in one line."""
    sizes = job.sizes
    shared = f", shared {sizes.shared}" if sizes.shared else ""
    return (
        f"{sizes.tokens:,} tokens a rank, {sizes.experts} experts of {sizes.ffn}{shared}, "
        f"top-{sizes.topk}, hidden {sizes.hidden}; EP {sizes.ep}, TP {job.tp}, ETP {sizes.etp}"
    )


COLUMNS = ("sent", "network", "calls", "exposed", "waiting", "layer", "kept")


def cells(one: PricedProgram) -> tuple[str, ...]:
    """The figures of a program that exists, as :data:`COLUMNS` are called."""
    line = one.simulation
    assert line is not None
    return (
        _bytes(line.wire()),
        _bytes(_between_nodes(line)),
        f"{line.calls(FORWARD)}+{line.calls(BACKWARD)}",
        f"{one.exposed(FORWARD)}+{one.exposed(BACKWARD)}",
        f"{line.exposed() * 1e3:.4g}",
        f"{line.total * 1e3:.4g}",
        _bytes(one.kept),
    )


def print_table(job: LayerJob, found: Sequence[PricedProgram]) -> None:
    """Print a line for each program, then what their flags are."""
    caption = (
        "sent: by one rank, both passes; network: the part to other nodes; calls and "
        "exposed: collectives of forward + backward, exposed ones have no computation beside "
        "them; waiting, layer: milliseconds of both passes, attention included (1f1b, fb-overlap: "
        "of two micro-batches at once); kept: rows of experts that live until backward; *: the "
        "shortest"
    )
    priced = [(one, one.simulation) for one in found if one.simulation is not None]
    shortest = min((line.total for _, line in priced), default=0.0)
    rows = (
        (one.name + (" *" if line.total == shortest else ""), *cells(one)) for one, line in priced
    )
    console = print_comparison(title(job), caption, "program", COLUMNS, rows)
    for one in found:
        text = one.flags if one.simulation is not None else f"not here: {one.reason}"
        console.print(f"{one.name}: {text}", highlight=False, markup=False)


def _between_nodes(line: Simulation) -> float:
    """Bytes that a rank sends to other nodes."""
    return sum(message.between for messages in line.messages.values() for message in messages)


def _bytes(value: Any) -> str:
    found = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if found < 1000:
            return f"{found:.3g} {unit}"
        found /= 1000
    return f"{found:.3g} TB"
