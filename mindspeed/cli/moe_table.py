"""Output of ``mindspeed moe plan``: a table, or plain data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed.moe.comparison import Job, Priced
from mindspeed.moe.costs import BACKWARD, FORWARD


def as_data(job: Job, found: Sequence[Priced]) -> dict[str, object]:
    """Plain data for JSON: bytes, and seconds from the start of forward."""
    return {
        "sizes": asdict(job.sizes),
        "tp": job.tp,
        "programs": [
            {"name": one.name, "flags": one.flags, **_figures(one)}
            if one.simulation is not None
            else {"name": one.name, "flags": one.flags, "reason": one.reason}
            for one in found
        ],
    }


def _figures(one: Priced) -> dict[str, object]:
    line = one.simulation
    assert line is not None
    return {
        "sent": line.wire(),
        "sent_between_nodes": sum(
            message.between for messages in line.messages.values() for message in messages
        ),
        "calls": {phase: line.calls(phase) for phase in (FORWARD, BACKWARD)},
        "exposed": {phase: one.exposed(phase) for phase in (FORWARD, BACKWARD)},
        "exposed_seconds": line.exposed(),
        "forward_seconds": line.ends[FORWARD],  # the end; backward may have begun before
        "seconds": line.total,
        "kept": one.kept,
        "intervals": [asdict(interval) for interval in line.intervals],
    }


def title(job: Job) -> str:
    """The sizes in one line."""
    sizes = job.sizes
    shared = f", shared {sizes.shared}" if sizes.shared else ""
    return (
        f"{sizes.tokens:,} tokens a rank, {sizes.experts} experts of {sizes.ffn}{shared}, "
        f"top-{sizes.topk}, hidden {sizes.hidden}; EP {sizes.ep}, TP {job.tp}, ETP {sizes.etp}"
    )


def print_table(job: Job, found: Sequence[Priced]) -> None:
    """Print a line for each program, then what their flags are."""
    table = Table(
        title=title(job),
        caption="sent: by one rank, both passes; network: the part to other nodes; calls and "
        "exposed: collectives of forward + backward, exposed ones have no computation beside "
        "them; waiting, layer: milliseconds of both passes, attention included (1f1b, fb-overlap: "
        "of two micro-batches at once); kept: rows of experts that live until backward; *: the "
        "shortest",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("program", no_wrap=True)
    for column in ("sent", "network", "calls", "exposed", "waiting", "layer", "kept"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    shortest = min(
        (one.simulation.total for one in found if one.simulation is not None), default=0.0
    )
    for one in found:
        if (line := one.simulation) is None:
            continue
        figures = _figures(one)
        table.add_row(
            one.name + (" *" if line.total == shortest else ""),
            _bytes(line.wire()),
            _bytes(figures["sent_between_nodes"]),
            f"{line.calls(FORWARD)}+{line.calls(BACKWARD)}",
            f"{one.exposed(FORWARD)}+{one.exposed(BACKWARD)}",
            f"{line.exposed() * 1e3:.4g}",
            f"{line.total * 1e3:.4g}",
            _bytes(one.kept),
        )
    console = Console()
    console.print(table)
    for one in found:
        text = one.flags if one.simulation is not None else f"not here: {one.reason}"
        console.print(f"{one.name}: {text}", highlight=False, markup=False)


def _bytes(value: Any) -> str:
    found = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if found < 1000:
            return f"{found:.3g} {unit}"
        found /= 1000
    return f"{found:.3g} TB"
