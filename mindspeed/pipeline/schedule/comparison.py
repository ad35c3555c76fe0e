"""Every schedule for one job, priced by the simulator.

    jobs = compare(Job(ranks=8, chunks=2, num_microbatches=64), names=ENTRIES)

A schedule that does not exist for these sizes has its reason instead of a price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import read_plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import Simulation, simulate, unpaired_note


@dataclass(frozen=True)
class Entry:
    """One line of the comparison.

    Attributes:
        changes: fields of :class:`ScheduleRequest`.
        chunks: model chunks of a rank, where the schedule does not take those of the job.
        flags: that train with it.
    """

    changes: dict[str, Any]
    chunks: int | None = None
    flags: str = ""


ENTRIES: dict[str, Entry] = {
    "1f1b": Entry({"kind": "1f1b"}, 1, "none: Megatron's own"),
    "interleaved": Entry({"kind": "interleaved"}, None, "none: Megatron's own"),
    "zb-h1": Entry({"kind": "zb-h1"}, None, "--pipeline-schedule zb-h1"),
    "nanopipe": Entry({"kind": "nanopipe"}, None, "--use-nanopipe"),
    "nanopipe-swap": Entry(
        {"kind": "nanopipe", "swap": True}, None, "--use-nanopipe --use-nanopipe-swap"
    ),
    "zb-v": Entry({"kind": "zb-v"}, 2, "--pipeline-schedule zb-v"),
    "dualpipev": Entry(
        {"kind": "dualpipev", "split_cooldown": True},
        2,
        "--schedules-method dualpipev --dualpipev-dw-detach",
    ),
    "v-half": Entry({"kind": "v-half"}, 2, "--pipeline-schedule v-half"),
    "v-min": Entry({"kind": "v-min"}, 2, "--pipeline-schedule v-min"),
    "wave": Entry({"kind": "wave"}, None, "--pipeline-schedule wave"),
    "zb-wave": Entry({"kind": "zb-wave"}, None, "--pipeline-schedule zb-wave"),
    "aiao": Entry({"kind": "aiao"}, None, "--fold-mode aiao"),
    "aiao-strict": Entry(
        {"kind": "aiao", "strict": True}, None, "--fold-mode aiao --fold-order strict"
    ),
    "recompute-in-bubble": Entry(
        {"kind": "interleaved", "recompute": "bubble"}, None, "--recompute-in-bubble"
    ),
    "recompute-in-advance": Entry(
        {"kind": "interleaved", "recompute": "advance"}, None, "--recompute-in-advance"
    ),
    "auto": Entry({"kind": "auto"}, None, "--pipeline-schedule auto"),
    "v-auto": Entry({"kind": "v-auto"}, 2, "--pipeline-schedule v-auto"),
}


@dataclass(frozen=True)
class ScheduleJob:
    """Job for which schedules are compared.

    Attributes:
        ranks: p.
        chunks: v.
        num_microbatches: m.
        costs: of a micro-batch through all stages of a rank; its ``stage_shares`` are not used.
        memory_limit: in A, the activations of one micro-batch over all stages of a rank.
        sizes: samples of each micro-batch, where they differ.
        stage_costs: of each of the p v stages, relative to one another and to ``costs``, where
            they differ; 1 is a stage of the usual number of layers.
        pairs: a forward and a backward run at the same time (:mod:`.pairs`); files say it
            themselves, and have none where nothing is exchanged.
    """

    ranks: int
    chunks: int
    num_microbatches: int
    costs: Costs = field(default_factory=Costs)
    memory_limit: float | None = None
    sizes: tuple[int, ...] | None = None
    stage_costs: tuple[float, ...] | None = None
    pairs: bool = False

    def costs_for(self, chunks: int) -> Costs:
        """Costs where each rank has ``chunks`` stages.

        Raises:
            ConfigError: the stages of the job cannot be joined to that number.
        """
        if self.stage_costs is None:
            return self.costs
        wanted, given = self.ranks * chunks, len(self.stage_costs)
        if given % wanted:
            raise ConfigError(f"the costs are of {given} stages, it has {wanted}")
        joined, each = given // wanted, given // self.ranks
        shares = [
            sum(self.stage_costs[stage * joined : (stage + 1) * joined]) / each
            for stage in range(wanted)
        ]
        return replace(self.costs, stage_shares=tuple(shares))


@dataclass(frozen=True)
class PricedSchedule:
    """A schedule and its price.

    Attributes:
        name: of the entry, or of the file.
        flags: that train with it.
        simulation: None where the schedule does not exist for the job.
        reason: why not.
        note: what else is to be known of it.
    """

    name: str
    flags: str
    simulation: Simulation | None
    reason: str = ""
    note: str = ""


def compare(job: ScheduleJob, names: Sequence[str] = tuple(ENTRIES)) -> list[PricedSchedule]:
    return [_priced(job, name) for name in names]


def _priced(job: ScheduleJob, name: str) -> PricedSchedule:
    changes: dict[str, Any]
    note = ""
    if name in ENTRIES:
        entry = ENTRIES[name]
        changes, flags = dict(entry.changes), entry.flags
        chunks = job.chunks if entry.chunks is None else entry.chunks
    else:
        plan = read_plan(Path(name), ranks=job.ranks, num_microbatches=job.num_microbatches)
        if plan.paired and not (job.pairs or job.costs.exchange):
            note = unpaired_note(plan, job.costs)
            plan = plan.without_pairs()
        changes, flags = {"plan": plan}, f"--pipeline-schedule {name}"
        chunks = plan.placement.chunks
    try:
        costs = job.costs_for(chunks)
        request = ScheduleRequest(
            **changes,
            memory_limit=job.memory_limit,
            sizes=job.sizes,
            costs=costs,
            pairs=job.pairs,
        )
        plan = build_plan(request, job.ranks, chunks, job.num_microbatches)
    except ConfigError as error:
        return PricedSchedule(name, flags, None, str(error))
    return PricedSchedule(name, flags, simulate(plan, costs), note=note)
