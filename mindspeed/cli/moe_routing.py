"""``mindspeed moe plan --routing DIR``: the price of recorded routing, and better placements."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from mindspeed.errors import ConfigError
from mindspeed.moe.comparison import LayerJob, PricedProgram, compare
from mindspeed.moe.load.placement import ExpertPlacement, in_order, search, with_copies
from mindspeed.moe.load.recorded import RecordedLoad
from mindspeed.moe.load.routing import RecordedRouting, read
from mindspeed.moe.load.slots import slots_of, write
from mindspeed.moe.parted_costs import expert_bytes
from mindspeed.moe.sizes import Sizes

HOT, SHOWN = 3, 12
_STATES = 14  # bytes of a parameter: bf16 weight, fp32 main weight and two moments


@dataclass(frozen=True)
class PlacedLayer:
    """One layer: the fullest rank over the mean, and rows between nodes, of its placements.

    Attributes:
        hottest: what no placement goes below.
        copies: with a copy more on each rank.
        hot: experts that ``--balanced-moe-experts`` chooses.
        slots: of the searched placement.
    """

    layer: int
    ordered: float
    searched: float
    hottest: float
    copies: float
    between_before: int
    between: int
    hot: list[int]
    slots: list[int]


def read_routing(
    args: argparse.Namespace, model: Mapping[str, Any], sizes: Sizes
) -> RecordedRouting:
    """The recorded routing of the model that is planned.

    Raises:
        ConfigError: it is of another model.
    """
    from mindspeed.profiling.model_flops import moe_pattern

    recorded = read(args.routing)
    layers = None
    if model:
        pattern = moe_pattern({**model, "num_experts": sizes.experts})
        layers = [number for number, moe in enumerate(pattern, 1) if moe]
    recorded.check(sizes.experts, sizes.topk, layers)
    if sizes.ep == 1:
        raise ConfigError("--routing: with --ep 1 one rank has all experts; give --ep 2 or more")
    return recorded


def place(recorded: RecordedRouting, sizes: Sizes) -> list[PlacedLayer]:
    """Search a placement for every layer."""
    node = sizes.ep if sizes.node is None else max(1, sizes.node // sizes.etp)
    return [_placed(recorded, number, sizes, node) for number in sorted(recorded.layers)]


def _placed(recorded: RecordedRouting, number: int, sizes: Sizes, node: int) -> PlacedLayer:
    question = recorded.question(number, sizes.ep, node)
    tokens = recorded.layers[number].tokens
    mean = max(1, sum(tokens)) / sizes.ep
    before, found = in_order(question), search(question)
    copies, _ = with_copies(tokens, sizes.ep, sizes.experts + sizes.ep)
    hot = RecordedLoad(recorded.layers[number]).hot(sizes, min(HOT, sizes.local))
    return PlacedLayer(
        number,
        before.value[0] / mean,
        found.value[0] / mean,
        max(tokens) / mean,
        copies / mean,
        before.value[1],
        found.value[1],
        hot,
        _slots(found, before, sizes),
    )


def _slots(found: ExpertPlacement, before: ExpertPlacement, sizes: Sizes) -> list[int]:
    better = found if found.value < before.value else before
    return slots_of(better.place, sizes.ep)


def worst(recorded: RecordedRouting, layers: Sequence[PlacedLayer]) -> RecordedLoad:
    """The load of the layer whose fullest rank has most."""
    fullest = max(layers, key=lambda one: one.ordered)
    return RecordedLoad(recorded.layers[fullest.layer])


def placed_prices(job: LayerJob, names: Sequence[str]) -> list[PricedProgram]:
    """Prices of the same layer with its experts where the search has put them."""
    assert job.recorded is not None
    return compare(replace(job, recorded=replace(job.recorded, placed=True)), names)


def exchange_price(
    job: LayerJob, layers: Sequence[PlacedLayer], link: float
) -> tuple[int, float, float]:
    """Experts that change ranks, bytes of all, and seconds of the rank that sends most.

    Args:
        job: sizes of the layer.
        layers: their placements.
        link: bytes per second that a rank sends.
    """
    sizes = job.sizes
    each = expert_bytes(sizes) / sizes.itemsize * _STATES
    sent, moved = [0] * sizes.ep, 0
    for one in layers:
        for expert, slot in enumerate(one.slots):
            if expert // sizes.local != slot // sizes.local:
                moved += 1
                sent[expert // sizes.local] += 1
    return moved, moved * each, max(sent) * each / link


def as_data(layers: Sequence[PlacedLayer]) -> list[dict[str, Any]]:
    return [asdict(one) for one in layers]


def print_layers(recorded: RecordedRouting, layers: Sequence[PlacedLayer]) -> None:
    """Print the layers whose fullest rank has most."""
    console = Console(highlight=False)
    table = Table(title=f"{recorded.name}: fullest rank / mean", title_justify="left")
    for heading in (
        "layer",
        "in order",
        "placed",
        "hottest",
        "with copies",
        "between nodes",
        "hot",
    ):
        table.add_column(heading, justify="right")
    for one in sorted(layers, key=lambda one: -one.ordered)[:SHOWN]:
        fewer = f"{one.between / one.between_before:.0%}" if one.between_before else ""
        figures = (one.ordered, one.searched, one.hottest, one.copies)
        cells = [f"{figure:.3f}" for figure in figures]
        table.add_row(str(one.layer), *cells, fewer, ", ".join(map(str, one.hot)))
    console.print(table)
    if len(layers) > SHOWN:
        console.print(f"{SHOWN} of {len(layers)} layers; --json has all")
    console.print(
        "placed: best of a search, without memory, same losses; hottest: no placement goes below; "
        "with copies: one more expert on each rank; hot: those of --balanced-moe-experts",
        soft_wrap=True,
    )


def write_placement(args: argparse.Namespace, sizes: Sizes, layers: Sequence[PlacedLayer]) -> None:
    """Write ``--placement``."""
    write(args.placement, sizes.ep, {one.layer: one.slots for one in layers})
    print(f"written: {args.placement}, for --moe-expert-placement")


def print_exchange(
    job: LayerJob,
    layers: Sequence[PlacedLayer],
    now: Sequence[PricedProgram],
    then: Sequence[PricedProgram],
    link: float,
) -> None:
    """Print what the exchange costs and saves, by the shortest program."""
    moved, sent, seconds = exchange_price(job, layers, link)
    if not moved:
        print("no placement is better than experts in order")
        return
    best = min(one.simulation.total for one in now if one.simulation is not None)
    after = min(one.simulation.total for one in then if one.simulation is not None)
    saved = best - after
    print(
        f"exchange: {moved} experts, {sent / 1e9:.3g} GB with optimizer states, {seconds:.3g} s of "
        f"the rank that sends most; saves {saved * 1e3:.3g} of {best * 1e3:.4g} ms in the fullest "
        "layer and micro-batch"
        + (f": pays after {seconds / saved:,.0f} of these" if saved > 0 else ": it never pays")
    )
