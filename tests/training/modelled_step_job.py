"""Modelled steps, and the same steps on real ranks, in processes of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.support.trainer_job import command

FLOPS, BANDWIDTH, LATENCY = 1e9, 1e6, 1e-3


def _args(flags: str, ranks: int) -> Any:
    from mindspeed.training.initialize import prepare

    return prepare(command(["--dry-run", *flags.split()]), ranks).args


def modelled(cases: Sequence[tuple[str, int]]) -> list[Any]:
    """Steps of several jobs, one after the other: figures by layer and phase, and the sum."""
    return [_modelled(_args(flags, ranks)) for flags, ranks in cases]


def _modelled(args: Any, **options: Any) -> dict[str, Any]:
    from mindspeed.instruments import Link
    from mindspeed.training import modelled_costs
    from mindspeed.training.modelled_step import Cluster, NotModelled, run

    link = Link(BANDWIDTH, LATENCY)
    try:
        step = run(args, Cluster(FLOPS, link, Link(BANDWIDTH / 2, LATENCY), 4), **options)
    except NotModelled as error:
        return {"refused": str(error)}
    layers = modelled_costs.by_layer(step.intervals)
    return {
        "layers": layers,
        "alike": [names for names, _, _ in modelled_costs.alike(layers)],
        "total": modelled_costs.total(step.intervals),
        "seconds": step.seconds,
        "counted": _counted(i.communication for i in step.intervals if i.kind == "communication"),
    }


def staged(flags: str, ranks: int, stages: Sequence[int]) -> list[Any]:
    """Steps of several pipeline stages."""
    return [_modelled(_args(flags, ranks), stage=stage) for stage in stages]


def real(flags: str, ranks: int) -> Counter[Any]:
    """What a rank of a real job communicates in the same program."""
    from mindspeed.instruments import CommLedger
    from mindspeed.training import modelled_step, setup

    args = _args(flags, ranks)
    args.check_for_nan_in_loss_and_grad = False
    setup.initialize(args)
    config, chunks = modelled_step._build(args)
    with CommLedger() as ledger:
        modelled_step._step(args, config, chunks, 1)
    return _counted(ledger.events)


def _counted(events: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for event in events:
        if event.op != "barrier" and len(event.ranks) > 1:
            key = (event.op, event.description, event.phase)
            found[(*key, "calls")] += 1
            found[(*key, "bytes")] += event.wire
    return found
